"""Every fusion policy against `serial` and against the proven bound, on simulated long-tailed workloads.

    python tests/benchmarks/simulated_policies.py [--quick] [--history SIGMA|none] [--out results.json]

Workloads: 16, 128 and 512 samples per slot on 8 to 32 slots; response lengths log-normal with median 200, sigma 0.8 to
1.3, capped at 512, 1,024 and 2,048; scoring 0.1, 0.3 and 0.6 times and training 0.1, 0.4 and 1 times the slot-seconds
that `serial` spends on generation. Seeds are held out: rlhfuse and adaptive are tuned on lengths drawn with others.
`--history`: accuracy of the predicted lengths, as the sigma of log(expected / true); `none`: no prediction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from rlfuse.simulate.runner import simulate
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Workload, parse

POLICIES = ("serial", "stream", "rlhfuse", "adaptive")
LOADS = ((16, 32), (16, 8), (128, 16), (128, 8), (512, 8), (512, 16))
"""(samples per slot, slots)"""
CAPS = ((512, 0.8), (1024, 1.0), (2048, 1.3))
"""(cap, sigma)"""
SCORING, TRAINING = (0.1, 0.3, 0.6), (0.1, 0.4, 1.0)


def workloads(quick: bool) -> list[dict]:
    """Yield every combination of load, cap, scoring and training; slots alternate over loads and sigmas."""
    loads = LOADS[::2] if quick else LOADS
    shapes = itertools.product(loads, CAPS, SCORING[1:2] if quick else SCORING, TRAINING)
    return [
        {"per_slot": load, "slots": slots, "cap": cap, "sigma": sigma, "scoring": scoring, "training": training}
        for (load, slots), (cap, sigma), scoring, training in shapes
    ]


def build(shape: dict, seed: int, history: float | None, generation_s: float | None = None) -> Workload:
    """Return the workload; with `generation_s` (of serial generation), rates follow from the shape's ratios to it."""
    count, slots = shape["per_slot"] * shape["slots"], shape["slots"]
    lengths = {"lognormal": {"median": 200, "sigma": shape["sigma"]}, "cap": shape["cap"], "count": count}
    fields = {"slots": slots, "seed": seed, "response_tokens": lengths, "prompt_tokens": 128, "switch_s": 0.5}
    fields |= {"kv_bytes_per_token": 800_000, "link_bytes_per_s": 2.5e10, "length_history_sigma": history}
    scoring, training = {"tokens_per_s": 40_000}, {"tokens_per_s": 8_000, "mini_batches": 4}
    if generation_s is not None:
        tokens = float(parse(fields).lengths().sum()) + 128 * count
        scoring["tokens_per_s"] = tokens / (shape["scoring"] * slots * generation_s)
        training["tokens_per_s"] = tokens / (shape["training"] * slots * generation_s)
    return parse(fields | {"scoring": scoring, "training": training})


def measure(shape: dict, seed: int, history: float | None) -> dict:
    """Return one row: the times of every policy on the workload."""
    generation_s = simulate(build(shape, seed, history), "serial").result.generation_s
    workload = build(shape, seed, history, generation_s)
    others = build(shape, seed + 1000, history, generation_s)
    settings = {policy: tune(others, policy) for policy in POLICIES}
    results = {policy: simulate(workload, policy, settings[policy]).result for policy in POLICIES}
    chosen = {f"{policy} settings": asdict(settings[policy]) for policy in POLICIES}
    return shape | chosen | {policy: result.as_json() for policy, result in results.items()}


def table(rows: list[dict]) -> str:
    """Return a table of speedups over serial for the step (and generation + scoring), and distances to the bound."""
    head = ["per slot", "slots", "cap", "sigma", "score", "train"]
    head += [f"{p} step (gen+score)" for p in POLICIES[1:]] + ["adaptive / bound", "bound by"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row[key] for key in ("per_slot", "slots", "cap", "sigma", "scoring", "training")]
        cells += [
            f"{over(row, p, 'step_s'):.2f} ({over(row, p, 'generation_and_scoring_s'):.2f})" for p in POLICIES[1:]
        ]
        cells += [f"{distance(row, 'adaptive'):.3f}", row["adaptive"]["bound_by"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def over(row: dict, policy: str, time_of: str) -> float:
    """Return the speedup over serial."""
    return row["serial"][time_of] / row[policy][time_of]


def distance(row: dict, policy: str) -> float:
    """Return the step time over its lower bound."""
    return row[policy]["step_s"] / row[policy]["oracle_s"]


def summary(rows: list[dict]) -> str:
    """Return the numbers that targets refer to."""
    lines = []
    for policy in POLICIES[1:]:
        for time_of in ("step_s", "generation_and_scoring_s"):
            gains = [over(row, policy, time_of) for row in rows]
            spread = f"least {min(gains):.3f}, median {statistics.median(gains):.3f}, most {max(gains):.3f}"
            lines.append(f"{policy:<9} over serial, {time_of:<25} {spread}")
    gains = [row["rlhfuse"]["step_s"] / row["adaptive"]["step_s"] for row in rows]
    spread = f"least {min(gains):.3f}, median {statistics.median(gains):.3f}, most {max(gains):.3f}"
    lines.append(f"adaptive  over rlhfuse, step_s                   {spread}")
    for policy in POLICIES:
        far = [distance(row, policy) for row in rows]
        lines.append(f"{policy:<9} over the bound: median {statistics.median(far):.3f}, worst {max(far):.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run all workloads; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sixth of the workloads")
    parser.add_argument("--history", default="0.3", help="sigma of log(expected / true length), or none")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="all results as JSON")
    arguments = parser.parse_args()
    history = None if arguments.history == "none" else float(arguments.history)
    rows, began = [], time.monotonic()
    shapes = workloads(arguments.quick)
    for number, shape in enumerate(shapes, 1):
        rows.append(measure(shape, arguments.seed, history))
        print(f"\r{number}/{len(shapes)} workloads, {time.monotonic() - began:.0f} s", end="", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1))
    print("\n" + table(rows) + "\n\n" + summary(rows))


if __name__ == "__main__":
    main()
