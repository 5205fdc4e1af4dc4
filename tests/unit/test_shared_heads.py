"""Schedules with heads that all devices compute together: no deadlocks, and one order of heads on all devices."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_deadlock import PROBLEMS, layout, problem, schedules

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_group import forward_only
from rlfuse.fusion.schedules import shared_heads
from rlfuse.fusion.schedules.baselines import serial_1f1b, serial_1f1b_rows
from rlfuse.fusion.schedules.operations import Operation, shared_head
from rlfuse.fusion.schedules.planning import SCORED, Planner
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.schedule import peaks, timed
from rlfuse.fusion.schedules.transfers import check_deadlock

HEADS = {"actor": 1.5, "ref": 0.5}
"""Seconds of a shared head; the head of the critic is not shared."""


def shared_layout(given_problem):
    """Return the models of the problem as pipelines, in which policies share their heads."""
    return tuple(
        Pipelines(each.model, each.stages, each.pipelines, each.direction, each.chunks, each.placement, None, is_shared)
        for each in layout(given_problem)
        for is_shared in [each.model != "critic"]
    )


def heads_of(given_problem):
    return {name: seconds for name, seconds in HEADS.items() if name in {each.name for each in given_problem.models}}


def assert_same_order(rows, given_problem):
    """Check that all devices of a pipeline compute the same heads in the same order."""
    orders = defaultdict(set)
    for device, row in enumerate(rows):
        order = tuple(shared_head(each) for each in row if each.kind == "H")
        orders[device].add(order)
    assert len(set.union(*orders.values())) == 1
    count = sum(each.micro_batches for each in given_problem.models if each.name in HEADS)
    assert len(next(iter(orders[0]))) == count


@pytest.mark.parametrize("shape", PROBLEMS)
@pytest.mark.parametrize("stages", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_schedule_with_shared_heads_ends_on_every_backend(stages, shape):
    given_problem = problem(stages, **PROBLEMS[shape])
    for _, rows in schedules(given_problem):
        for rows_with_heads in (
            *(
                shared_heads.with_heads(given_problem, rows, heads_of(given_problem), patient)
                for patient in (False, True)
            ),
            shared_heads.best(given_problem, rows, heads_of(given_problem)),
        ):
            check_deadlock(rows_with_heads, shared_layout(given_problem))
            assert_same_order(rows_with_heads, given_problem)


@pytest.mark.slow
@given(st.integers(2, 5), st.integers(1, 7), st.lists(st.floats(0.1, 9), min_size=10, max_size=10), st.floats(0.01, 20))
@settings(max_examples=60, deadline=None)
def test_schedules_end_and_keep_their_orders_for_any_durations(stages, micro_batches, seconds, head):
    forward, backward = tuple(seconds[:stages]), tuple(seconds[5 : 5 + stages])
    models = [
        Model(name, stages, micro_batches, forward, backward, direction=way)
        for name, way in (("actor", "down"), ("critic", "up"))
    ]
    given_problem, heads = (
        Problem(stages, (*models, Model("ref", stages, 2, forward, None))),
        {"actor": head, "ref": head / 3},
    )
    for _, rows in schedules(given_problem):
        for patient in (False, True):
            rows_with_heads = shared_heads.with_heads(given_problem, rows, heads, patient)
            check_deadlock(rows_with_heads, shared_layout(given_problem))
            assert tuple(tuple(each for each in row if each.kind != "H") for row in rows_with_heads) == rows
            timed(given_problem, rows_with_heads, shared_heads.duration(given_problem, heads))


@pytest.mark.parametrize("stages, layers, gain", [(4, 6, 1.14), (8, 3, 1.9)])
def test_a_large_head_is_faster_on_all_devices(stages, layers, gain):
    # 24 layers and a head that costs 9.1 layers, compared with stages of equal cost whose last has only the head.
    # Devices wait for each other only while the pipeline fills and empties, with 1.5x the memory of 1F1B.
    count = 2 * stages
    even, heads = tuple(float(layers) for _ in range(stages)), {"actor": 3 * 9.1 / stages}
    given_problem = Problem(
        stages, (Model("actor", stages, count, even, tuple(2 * each for each in even)),), memory_cap=1.5
    )
    rows = tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(given_problem))
    times = timed(
        given_problem, shared_heads.best(given_problem, rows, heads), shared_heads.duration(given_problem, heads)
    )
    assert max(peaks(given_problem, times)) <= 1.5 * given_problem.memory_unit
    took = max(row[-1].end for row in times)
    by_cost = Pipelines("actor", stages).balanced(([1.0] * 24, 0.0, 9.1))
    cut = (*map(float, by_cost[:-1]), by_cost[-1] + 9.1)
    alone = Problem(stages, (Model("actor", stages, count, cut, tuple(2 * each for each in cut)),))
    assert serial_1f1b(alone) > gain * took
    last = times[-1]
    assert sum(after.start - before.end for before, after in pairwise(last)) == pytest.approx(0)


def test_heads_respect_the_memory_of_1f1b():
    even = (3.0,) * 4
    given_problem = Problem(4, (Model("actor", 4, 8, even, (6.0,) * 4),), memory_cap=1.0)
    rows = tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(given_problem))
    times = timed(
        given_problem, shared_heads.best(given_problem, rows, HEADS), shared_heads.duration(given_problem, HEADS)
    )
    assert max(peaks(given_problem, times)) <= given_problem.memory_unit * (1 + 1e-9)


def test_a_planner_schedules_shared_heads_and_predicts_their_times():
    planner = Planner(2, split=True, vocabulary=True)
    counts, scored = {"actor": 3, "critic": 3}, {"actor": 2, "ref": 2}
    assert not planner.plan(counts, scored).times
    for model in (*counts, *(name + SCORED for name in scored)):
        for stage in (0, 1):
            for kind, seconds in {"F": 0.1, "B": 0.1, "W": 0.1, "H": 0.2 + 0.3 * stage}.items():
                if model != "critic" or kind != "H":
                    planner.learn(Operation(model, 0, stage, 0, kind), seconds)
    plan = planner.plan(counts, scored)
    ways = [Pipelines("actor", 2, vocabulary=True), Pipelines("critic", 2, direction="up")]
    check_deadlock(plan.rows, (*ways, Pipelines("ref", 2, direction="up", vocabulary=True)))
    for row, times in zip(plan.rows, plan.times, strict=True):
        took = [end - start for each, (start, end) in zip(row, times, strict=True) if each.kind == "H"]
        assert took == pytest.approx([0.2] * 7)  # waiting for the other device is not work
    assert plan.seconds < plan.serial_s


def test_the_slowest_device_determines_the_time_of_a_head():
    planner = Planner(2, vocabulary=True)
    planner.replan([1.0, 2.0])
    for stage in (0, 1):
        for kind, seconds in {"F": 0.1, "B": 0.2, "H": 0.4 - 0.2 * stage}.items():
            planner.learn(Operation("actor", 0, stage, 0, kind), seconds)  # divided by the rate of the device
    plan = planner.plan({"actor": 3}, {})
    for row, times in zip(plan.rows, plan.times, strict=True):
        took = [end - start for each, (start, end) in zip(row, times, strict=True) if each.kind == "H"]
        assert took == pytest.approx([0.4] * 3)


@pytest.mark.parametrize("chunks, placement", [(1, "v"), (2, "v"), (2, "interleaved")])
def test_forward_only_schedules_end(chunks, placement):
    pipelines = Pipelines("ref", 3, 2, "up", chunks, placement, vocabulary=True)
    rows = forward_only(pipelines, 4)
    check_deadlock(rows, (pipelines,))
    assert [sum(each.kind == "H" for each in row) for row in rows] == [4] * 6


def operation(stage, kind, micro_batch=0):
    return Operation("actor", 0, stage, micro_batch, kind)


FIRST, LAST = [(*(operation(stage, kind) for kind in "FHB"),) for stage in (0, 1)]
WRONG = {
    "H of .* stage 0 micro-batch 0 is computed by 1 devices": (FIRST, tuple(each for each in LAST if each.kind != "H")),
    "H of .* stage 1 micro-batch 0 comes before F of .* stage 1": (FIRST, (LAST[1], LAST[0], LAST[2])),
    "B of .* stage 1 micro-batch 0 comes before H of .* stage 1": (FIRST, (LAST[0], LAST[2], LAST[1])),
    "Nothing in the schedule takes the result of F of .* stage 1": (FIRST[:1], LAST[:1]),
    "deadlocks: device 0 at H .* micro-batch 1; device 1 at H .* micro-batch 0": (
        (operation(0, "F"), operation(0, "F", 1), operation(0, "H", 1), operation(0, "H")),
        (operation(1, "F"), operation(1, "F", 1), operation(1, "H"), operation(1, "H", 1)),
    ),
}


@pytest.mark.parametrize("reason", WRONG)
def test_heads_that_differ_between_devices_are_rejected(reason):
    with pytest.raises(ScheduleError, match=reason):
        check_deadlock(WRONG[reason], (Pipelines("actor", 2, vocabulary=True),))
    with pytest.raises(ScheduleError, match="is computed by 2 devices"):
        check_deadlock((FIRST, LAST), (Pipelines("actor", 2),))
