"""The schedule planner: it searches once, reuses the schedule, and searches again when durations drift."""

import pytest

from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.planning import Planner

BOTH = {"actor": 4, "critic": 4}


def record(planner, seconds):
    """Record one measurement for each (model, stage, kind) -> seconds."""
    for (model, stage, kind), took in seconds.items():
        planner.learn(Operation(model, 0, stage, 0, kind), took)


def even_seconds(scale=1.0, slow_stage=1.0, kinds="FB"):
    lengths = {"F": 0.01, "B": 0.02, "W": 0.01}
    return {
        (model, stage, kind): scale * lengths[kind] * (slow_stage if stage else 1.0)
        for model in BOTH
        for stage in (0, 1)
        for kind in kinds
    }


def test_a_plan_without_measurements_has_a_schedule_but_no_prediction():
    plan = Planner(2).plan(BOTH)
    assert sum(map(len, plan.rows)) == 2 * 2 * 4 * 2
    assert plan.times == () and plan.seconds == 0.0


def test_a_fused_plan_is_shorter_than_serial_and_has_times_for_its_rows():
    planner = Planner(2)
    record(planner, even_seconds())
    plan = planner.plan(BOTH)
    assert plan.seconds < plan.serial_s == pytest.approx(2 * (4 + 1) * 0.03)
    assert [len(row) for row in plan.times] == [len(row) for row in plan.rows]


def test_serial_plans_are_1f1b_of_one_model_at_a_time():
    planner = Planner(2, "serial", split=True)
    record(planner, even_seconds())
    plan = planner.plan(BOTH)
    assert {operation.kind for row in plan.rows for operation in row} == {"F", "B"}
    for row in plan.rows:
        models = [operation.model for operation in row]
        assert models == sorted(models)


@pytest.mark.slow
def test_a_split_plan_of_one_model_has_weight_gradients():
    planner = Planner(2, split=True, memory_cap=1.0)
    record(planner, even_seconds(kinds="FBW"))
    plan = planner.plan({"actor": 4})
    assert {operation.kind for row in plan.rows for operation in row} == {"F", "B", "W"}
    assert {operation.model for row in plan.rows for operation in row} == {"actor"}


def test_a_new_search_runs_when_stages_drift_but_not_when_all_get_slower(monkeypatch):
    planner, searched = Planner(2), []
    search = planner._search
    monkeypatch.setattr(planner, "_search", lambda problem: searched.append(problem) or search(problem))
    record(planner, even_seconds())
    planner.plan(BOTH)
    for _ in range(9):
        record(planner, even_seconds(scale=3.0))
    planner.plan(BOTH)
    assert len(searched) == 1
    for _ in range(99):
        record(planner, even_seconds(scale=3.0, slow_stage=2.0))
    planner.plan(BOTH)
    assert len(searched) == 2


def test_scored_micro_batches_fill_bubbles_and_follow_trained_ones():
    planner, work = Planner(2), ({"actor": 4}, {"actor": 2, "ref": 4})
    lengths = {"F": 0.01, "B": 0.02}
    first = planner.plan(*work)
    for operation in (each for row in first.rows for each in row):
        planner.learn(first.planned_operation(operation), lengths[operation.kind])
    plan = planner.plan(*work)
    assert plan.serial_s == pytest.approx((4 + 1) * 0.03 + (2 + 1) * 0.01 + (4 + 1) * 0.01)
    assert plan.seconds == pytest.approx(4 * 0.03 + 0.01 + 6 * 0.01)  # only one forward of the actor is not in a bubble
    for row in plan.rows:
        numbers = {model: {o.micro_batch for o in row if o.model == model} for model in ("actor", "ref")}
        assert numbers == {"actor": set(range(6)), "ref": set(range(4))}
        assert {(o.model, o.micro_batch) for o in row if o.kind == "B"} == {("actor", i) for i in range(4)}


def test_unmeasured_durations_are_estimated_from_measured_ones():
    planner = Planner(2)
    record(planner, even_seconds())
    plan = planner.plan(BOTH, {"ref": 4})
    assert plan.serial_s == pytest.approx(2 * (4 + 1) * 0.03 + (4 + 1) * 0.01)
