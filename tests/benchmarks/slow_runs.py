"""Cost of a slow slot in a real run: the estimate of `rlfuse whatif` against the measured slowdown.

    python tests/benchmarks/slow_runs.py [--programs 1 2] [--repeats 2] [--steps 4]

Jobs of `slow_ranks.py step` with `fusion=serial` and `trainer.deterministic`, so that all of them generate and train
the same on the same slots: without other programs, then with one, two ... that compute on the second slot's core, and
without again. *Measured* is a run's step time over that of the undisturbed runs; *estimated* is `S_machine`, which
`whatif` derives from the slowed run alone, without knowing the slowed slot; `slowest` is the slot it ranks first. The
first step is left out of both. The programs also slow down processes that are not bound to a slot: the driver and Ray
move to the first slot's core, which an analysis of the slowed run cannot detect.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from slow_ranks import JOB, busy_programs, larger_policy, prepare


def slowdown(folder: str, policy: str, steps: int, count: int) -> dict:
    """Return the output of `whatif --out` for a job with this many programs on its second slot's core."""
    core, name = sorted(os.sched_getaffinity(0))[1], f"programs-{count}"
    more = (f"model.path={policy}", f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}")
    same = ("fusion=serial", "trainer.deterministic=true", f"trainer.total_training_steps={1 + steps}")
    command = [sys.executable, "-m", "rlfuse.cli"]
    with busy_programs(core, count) if count else nullcontext():
        subprocess.run([*command, "train", *JOB, *more, *same], check=True, stdout=subprocess.DEVNULL)
    run, out = Path(folder, "rlfuse", name), Path(folder, "found.json")
    analysis = [*command, "whatif", str(run), "--steps", str(steps), "--out", str(out)]
    subprocess.run(analysis, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    prepare()
    policy = larger_policy()
    print("| programs | step alone, s | step, s | measured | estimated | slowest |\n" + "|---" * 6 + "|", flush=True)
    for _ in range(options.repeats):
        found = {}
        for turn, count in enumerate((0, *options.programs, 0)):
            with tempfile.TemporaryDirectory() as folder:
                found[turn] = slowdown(folder, policy, options.steps, count)
        alone = statistics.mean(found[turn]["measured"] for turn in (0, len(options.programs) + 1))
        for turn, count in enumerate(options.programs, 1):
            measured, estimated = found[turn]["measured"] / alone, found[turn]["S_machine"]
            who, seconds = next(iter(found[turn]["workers"])), found[turn]["measured"]
            print(
                f"| {count} | {alone:.2f} s | {seconds:.2f} s | {measured:.2f} | {estimated:.2f} | {who} |", flush=True
            )


if __name__ == "__main__":
    main()
