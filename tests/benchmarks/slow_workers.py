"""Detection of slow and faulty workers: precision and recall for each kind of fault, false alarms in healthy runs.

    python tests/benchmarks/slow_workers.py [--runs 14] [--recorded 20] [--seed 1]

Runs come from `injected_faults` and `recorded_steps` in `tests/worlds`, with 2 to 16 slots and, for each kind, one of
64. A true positive is a run whose faulty machine is named; every worker named elsewhere is a false positive. No time is
measured, so that the machine need not be quiet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from worlds.injected_faults import FAULTS, NEAR_MISSES, MadeRun, alarms_of
from worlds.recorded_steps import DrawnRun

SLOTS = (2, 3, 4, 8, 2, 3, 4, 8, 16, 2, 3, 4, 8)
"""Numbers of slots, cycled; the last run of a kind has 64."""


def row(name: str, runs: Iterable[MadeRun | DrawnRun]) -> tuple[int, int, int]:
    """Print a row; return the numbers of faulty runs, correct and wrong alarms."""
    count = faulty = right = wrong = 0
    for run in runs:
        named = {alarm.worker for alarm in alarms_of(run)}
        count, faulty = count + 1, faulty + bool(run.guilty)
        right, wrong = right + bool(named & run.guilty), wrong + len(named - run.guilty)
    scores = (f"{right / max(1, right + wrong):.3f}", f"{right / faulty:.3f}") if faulty else ("", "")
    print(f"| {name} | {count} | {right if faulty else ''} | {wrong} | {scores[0]} | {scores[1]} |", flush=True)
    return faulty, right, wrong


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=14, help="made runs of each kind")
    parser.add_argument("--recorded", type=int, default=20, help="runs of recorded steps of each kind")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sizes = [*(SLOTS[i % len(SLOTS)] for i in range(given.runs - 1)), 64][-given.runs :]
    print("| kind | runs | found | wrong alarms | precision | recall |\n|---|---|---|---|---|---|")
    rows = []
    for number, kind in enumerate((*FAULTS, *NEAR_MISSES)):
        seeds = range(100_000 * given.seed + 1000 * number, 100_000 * given.seed + 1000 * number + given.runs)
        selection = {"fault": kind} if kind in FAULTS else {"near_miss": kind}
        name = kind if kind in FAULTS else f"healthy: {kind}"
        rows.append(row(name, (MadeRun(seed, slots, **selection) for seed, slots in zip(seeds, sizes, strict=True))))
    for kind in ("slow", "jittery", None):
        seeds = range(100_000 * given.seed, 100_000 * given.seed + given.recorded)
        name = f"recorded steps, {kind or 'healthy'}"
        rows.append(row(name, (DrawnRun(seed, 2 + seed % 5, kind) for seed in seeds)))
    faulty, right, wrong = (sum(column) for column in zip(*rows, strict=True))
    print(f"| all | | {right} of {faulty} | {wrong} | {right / max(1, right + wrong):.3f} | {right / faulty:.3f} |")


if __name__ == "__main__":
    main()
