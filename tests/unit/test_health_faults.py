"""Precision and recall on whole runs with a fault injected into one machine; healthy runs raise no alarm.

Thresholds are those of the paper (Minder, arXiv 2411.01791: precision 0.904, recall 0.883). The runs come from
`injected_faults` and `recorded_steps`; `tests/benchmarks/slow_workers.py` prints a table of many more runs.
"""

from collections import Counter

import pytest
from worlds.injected_faults import FAULTS, NEAR_MISSES, MadeRun, alarms_of
from worlds.recorded_steps import DrawnRun

PRECISION, RECALL = 0.904, 0.883
SLOTS = (2, 3, 4, 8)
"""Slots of the generated runs; one run also has 32."""


def count_alarms(run):
    """Count correct alarms (at most one), wrong alarms (one per worker), and faulty runs (0 or 1)."""
    named = {alarm.worker for alarm in alarms_of(run)}
    return Counter(right=bool(named & run.guilty), wrong=len(named - run.guilty), faulty=bool(run.guilty))


def check_precision_and_recall(counts):
    right, wrong, faulty = (counts[name] for name in ("right", "wrong", "faulty"))
    print(f"precision {right / max(1, right + wrong):.3f}, recall {right / max(1, faulty):.3f} of {faulty} runs")
    assert right >= PRECISION * (right + wrong) and right >= RECALL * faulty


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_generated_runs_with_faults():
    counts = Counter()
    for number, kind in enumerate(FAULTS):
        for i, slots in enumerate((*SLOTS, 32) if number == 0 else SLOTS):
            counts += count_alarms(MadeRun(1000 + 100 * number + i, slots, kind))
    assert counts["faulty"] == 21
    check_precision_and_recall(counts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_healthy_generated_runs():
    wrong = {}
    for number, kind in enumerate(NEAR_MISSES):
        for i, slots in enumerate((*SLOTS, 32) if number == 1 else SLOTS[:3]):
            named = {alarm.worker for alarm in alarms_of(MadeRun(5000 + 100 * number + i, slots, near_miss=kind))}
            wrong |= {(kind, i, slots): named} if named else {}
    assert not wrong, "of 26 runs"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recorded_steps_with_and_without_faults():
    counts, healthy = Counter(), Counter()
    for seed in range(8):
        for kind in ("slow", "jittery", None):
            run = DrawnRun(seed, 2 + seed % 5, kind)
            (counts if kind else healthy).update(count_alarms(run))
    assert counts["faulty"] == 16 and healthy["wrong"] == 0
    check_precision_and_recall(counts)
