"""The planner of a run's schedules: searched once, reused while durations hold, searched again when they drift."""

import pytest

from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.planning import Planner

BOTH = {"actor": 4, "critic": 4}


def learned(planner, seconds):
    """(model, stage, kind) -> seconds, measured once each."""
    for (model, stage, kind), took in seconds.items():
        planner.learn(Operation(model, 0, stage, 0, kind), took)


def even(scale=1.0, slow_stage=1.0, kinds="FB"):
    lengths = {"F": 0.01, "B": 0.02, "W": 0.01}
    return {
        (model, stage, kind): scale * lengths[kind] * (slow_stage if stage else 1.0)
        for model in BOTH
        for stage in (0, 1)
        for kind in kinds
    }


def test_before_anything_is_measured_there_is_a_schedule_but_no_prediction():
    plan = Planner(2).plan(BOTH)
    assert sum(map(len, plan.rows)) == 2 * 2 * 4 * 2
    assert plan.times == () and plan.seconds == 0.0


def test_a_fused_plan_is_shorter_than_serial_and_its_times_are_those_of_its_rows():
    planner = Planner(2)
    learned(planner, even())
    plan = planner.plan(BOTH)
    assert plan.seconds < plan.serial_s == pytest.approx(2 * (4 + 1) * 0.03)
    assert [len(row) for row in plan.times] == [len(row) for row in plan.rows]


def test_serial_is_1f1b_of_one_model_after_the_other_whatever_is_asked_of_fused_ones():
    planner = Planner(2, "serial", split=True)
    learned(planner, even())
    plan = planner.plan(BOTH)
    assert {operation.kind for row in plan.rows for operation in row} == {"F", "B"}
    for row in plan.rows:
        models = [operation.model for operation in row]
        assert models == sorted(models)


@pytest.mark.slow
def test_a_split_plan_has_weight_gradients_and_one_model_alone_is_planned_too():
    planner = Planner(2, split=True, memory_cap=1.0)
    learned(planner, even(kinds="FBW"))
    plan = planner.plan({"actor": 4})
    assert {operation.kind for row in plan.rows for operation in row} == {"F", "B", "W"}
    assert {operation.model for row in plan.rows for operation in row} == {"actor"}


def test_it_searches_anew_when_stages_drift_apart_but_not_when_all_get_slower(monkeypatch):
    planner, searched = Planner(2), []
    search = planner._search
    monkeypatch.setattr(planner, "_search", lambda problem: searched.append(problem) or search(problem))
    learned(planner, even())
    planner.plan(BOTH)
    for _ in range(9):
        learned(planner, even(scale=3.0))
    planner.plan(BOTH)
    assert len(searched) == 1
    for _ in range(99):
        learned(planner, even(scale=3.0, slow_stage=2.0))
    planner.plan(BOTH)
    assert len(searched) == 2


def test_scored_micro_batches_fill_bubbles_and_come_behind_those_that_are_trained_on():
    planner, work = Planner(2), ({"actor": 4}, {"actor": 2, "ref": 4})
    lengths = {"F": 0.01, "B": 0.02}
    first = planner.plan(*work)
    for operation in (each for row in first.rows for each in row):
        planner.learn(first.planned_operation(operation), lengths[operation.kind])
    plan = planner.plan(*work)
    assert plan.serial_s == pytest.approx((4 + 1) * 0.03 + (2 + 1) * 0.01 + (4 + 1) * 0.01)
    assert plan.seconds == pytest.approx(4 * 0.03 + 0.01 + 6 * 0.01)  # one forward of the actor is all that waits
    for row in plan.rows:
        numbers = {model: {o.micro_batch for o in row if o.model == model} for model in ("actor", "ref")}
        assert numbers == {"actor": set(range(6)), "ref": set(range(4))}
        assert {(o.model, o.micro_batch) for o in row if o.kind == "B"} == {("actor", i) for i in range(4)}


def test_what_was_never_measured_is_guessed_from_what_was():
    planner = Planner(2)
    learned(planner, even())
    plan = planner.plan(BOTH, {"ref": 4})
    assert plan.serial_s == pytest.approx(2 * (4 + 1) * 0.03 + (4 + 1) * 0.01)
