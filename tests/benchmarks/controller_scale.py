"""CPU time of the driver for a large cluster: 1,024 slots and 65,536 samples, one step in virtual time.

    python tests/benchmarks/controller_scale.py [--slots 1024] [--samples 65536] [--profile]

The controller, board and policies are those of real jobs; only the engines are simulated. The reported time is that of
the whole process, simulated engines included: an upper limit for the controller.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse


def main() -> None:
    """Run each policy once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    arguments = parser.parse_args()
    lengths = {"lognormal": {"median": 200, "sigma": 1.0}, "cap": 1024, "count": arguments.samples}
    workload = parse(
        {"slots": arguments.slots, "response_tokens": lengths, "group": 8, "switch_s": 0.5}
        | {"training": {"mini_batches": 4}, "length_history_sigma": 0.3}
        | {"kv_bytes_per_token": 800_000, "link_bytes_per_s": 2.5e10}
    )
    print(f"{workload.slots:,} slots, {workload.samples:,} samples in groups of {workload.group}")
    for policy in POLICIES:
        profile, began = cProfile.Profile(), time.monotonic()
        if arguments.profile:
            profile.enable()
        result = simulate(workload, policy).result
        profile.disable()
        each = 1000 * result.cpu_s / workload.samples
        wall = time.monotonic() - began
        times = f"{wall:6.1f} s wall, {result.cpu_s:6.1f} s of CPU, {each:.2f} ms a sample"
        print(f"{policy:<9} {times}; simulated step {result.step_s:.1f} s", flush=True)
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
