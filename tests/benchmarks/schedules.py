"""Quality of fused schedules: ours, baselines, RLHFuse's published ones and the proven bound; seconds and memory.

    python tests/benchmarks/schedules.py [PART ...] [--seeds N]

Parts, all by default: `whole` (no cap), `capped` (whole backward at the published memory), `lean` (at 1.10), `split`
(cap 1.0), `v` (split, two chunks per device for both models, then for the actor alone, cap 1.0), `large` (N = 32,
M = 128 at cap 2.0) and `robust` (jitter, communication, B : W). One core; nothing is cached. Times are wall time; CPU
time next to it shows the influence of a busy machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from published_schedules import INSTANCES, parse, problem

from rlfuse.fusion.schedules.baselines import baseline
from rlfuse.fusion.schedules.operations import Rows
from rlfuse.fusion.schedules.problem import Problem
from rlfuse.fusion.schedules.schedule import Schedule, timed
from rlfuse.fusion.schedules.search import search, warm_up

ROUNDED = 5e-4
"""Tolerance, as published memory has three digits."""
DRAWN = 20
"""Number of draws of jitter."""


def run(given: Problem, seconds: float, seed: int = 0) -> tuple[Schedule, float]:
    """Return a schedule and the CPU seconds of its search."""
    before = time.process_time()
    found = search(given, time_limit=seconds, seed=seed)
    return found, time.process_time() - before


def line(number: int | str, given: Problem, seconds: float, seed: int = 0) -> None:
    """Print one row of a table."""
    found, cpu = run(given, seconds, seed)
    baselines = [baseline(given, "zb-h1", barrier=True), baseline(given, "zb-v", barrier=False)]
    published = INSTANCES[number].published if isinstance(number, int) else float("nan")
    shown = [found.serial_1f1b, *(value or float("nan") for value in baselines), published]
    print(
        f"{number:>5}{seed:>5}"
        + "".join(f"{value:>9g}" for value in shown)
        + f"{found.makespan:>9g}{found.lower_bound:>9g}{found.makespan / found.lower_bound - 1:>8.2%}"
        f"{found.serial_1f1b / found.makespan:>8.3f}x{found.memory_peak:>8.3f}{found.seconds:>8.2f}{cpu:>8.2f}"
        f"  {found.method}",
        flush=True,
    )


def head(title: str) -> None:
    """Print the header of a table."""
    names = ("1F1B", "ZB-H1", "ZB-V", "RLHFuse", "ours", "bound")
    print(f"\n{title}\n{'#':>5}{'seed':>5}" + "".join(f"{name:>9}" for name in names), end="")
    print(f"{'above':>8}{'x 1F1B':>9}{'memory':>8}{'wall s':>8}{'CPU s':>8}  found by")


def whole(seeds: int) -> None:
    """Target: the bound, in at most 1 s each."""
    head("whole backward, no cap")
    for number in range(12):
        line(number, problem(number), 10)


def capped(seeds: int) -> None:
    """Target: the published makespan in at most 40 s, on three seeds."""
    head("whole backward, cap = the published memory")
    for number, each in enumerate(INSTANCES):
        for seed in range(seeds):
            line(number, problem(number, memory_cap=each.published_memory + ROUNDED), 40, seed)


def lean(seeds: int) -> None:
    """Target: the bound on ten of twelve."""
    head("whole backward, cap 1.10")
    for number in range(12):
        line(number, problem(number, memory_cap=1.1), 60)


def split(seeds: int) -> None:
    """Target: within 1.5 % of the bound on ten, 1.18x / 1.36x / 1.67x over serial 1F1B for M = 4N / 2N / N."""
    head("split backward, cap 1.0")
    for number in range(12):
        line(number, problem(number, split_backward=True, memory_cap=1.0), 10)


def v_placement(seeds: int) -> None:
    """Target: 1.19x / 1.39x / 1.77x, and never slower than ZB-V."""
    for chunks, title in ((2, "both models"), (1, "the actor")):
        head(f"split backward, {title} in a V, cap 1.0")
        for number in range(12):
            given = problem(number, split_backward=True, chunks_per_device=2, memory_cap=1.0)
            actor, critic = given.models
            line(number, replace(given, models=(actor, replace(critic, chunks_per_device=chunks))), 10)


def large(seeds: int) -> None:
    """Target: within 1 % of the bound in 60 s."""
    head("N = 32, M = 128, whole backward, cap 2.0")
    for name, count, times in (("K = 2", 2, (5, 4)), ("K = 1", 1, (5, 2))):
        actor = {"name": "actor", "stages": 32, "micro_batches": 128, "forward": times[0], "backward": 2 * times[0]}
        critic = {
            "name": "critic",
            "stages": 32 // count,
            "pipelines": count,
            "micro_batches": 128 // count,
            "forward": times[1],
            "backward": 2 * times[1],
            "direction": "up",
        }
        line(name, parse({"devices": 32, "memory_cap": 2.0, "models": [actor, critic]}), 60)


# Robustness ----------------------------------------------------------------------------------------------------------


def replayed(given: Problem, rows: Rows, jitter: float, rng: np.random.Generator) -> float:
    """Return the makespan of a static order if every duration has a lognormal factor."""

    def duration(each) -> float:
        model = given.model(each.model)
        return given.duration(model, each.pipeline, each.stage, each.kind) * float(rng.lognormal(0, jitter))

    return max(row[-1].end for row in timed(given, rows, duration))


def robust(seeds: int) -> None:
    """Print the makespan of planned schedules on a machine that differs from the plan."""
    ways: dict[str, dict] = {
        "whole, no cap": {},
        "split, cap 1.0": {"split_backward": True, "memory_cap": 1.0},
        "split in a V, cap 1.0": {"split_backward": True, "memory_cap": 1.0, "chunks_per_device": 2},
    }
    print("\nrobustness on instance 1: makespan of the planned order over the plan, or replanned if noted")
    for name, fields in ways.items():
        given = problem(1, **fields)
        found, _ = run(given, 10)
        rng, rows = np.random.default_rng(0), found.operations
        parts = [f"plan {found.makespan:g}"]
        for jitter in (0.02, 0.05, 0.1, 0.2):
            worse = np.mean([replayed(given, rows, jitter, rng) for _ in range(DRAWN)]) / found.makespan - 1
            parts.append(f"jitter {jitter:.0%} {worse:+.1%}")
        for share in (0.05, 0.2):
            late = problem(1, **fields, communication=share * 5)
            kept = max(row[-1].end for row in timed(late, rows))
            again, _ = run(late, 10)
            parts.append(f"p2p {share:.0%} of F {kept / found.makespan - 1:+.1%}, replanned ")
            parts[-1] += f"{again.makespan / found.makespan - 1:+.1%}"
        if given.split_backward:
            other = uneven(given)
            kept = max(row[-1].end for row in timed(other, rows))
            again, _ = run(other, 10)
            parts.append(f"B : W = 1.4 : 0.6 {kept / found.makespan - 1:+.1%}, replanned ")
            parts[-1] += f"{again.makespan / found.makespan - 1:+.1%}"
        print(f"  {name}: " + "; ".join(parts), flush=True)


def uneven(given: Problem) -> Problem:
    """Return the problem with W at 30 % of the backward pass."""
    data = asdict(given)
    data["models"] = [model | {"weight_gradient": 0.3} for model in data["models"]]
    return parse(data)


PARTS: dict[str, Callable[[int], None]] = {
    "whole": whole,
    "capped": capped,
    "lean": lean,
    "split": split,
    "v": v_placement,
    "large": large,
    "robust": robust,
}


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="of the capped part")
    arguments = parser.parse_args()
    began = time.perf_counter()
    warm_up()
    print(f"compiled, or loaded compiled code, in {time.perf_counter() - began:.1f} s")
    for name in arguments.parts or PARTS:
        PARTS[name](arguments.seeds)


if __name__ == "__main__":
    main()
