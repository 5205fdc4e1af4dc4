"""Heads that devices compute together, in schedules: every one of them ends, and all devices come in one order."""

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
"""Seconds; the critic's is its own."""


def shared(of):
    """The problem's models as ranks hold them, where policies share their heads."""
    return tuple(
        Pipelines(each.model, each.stages, each.pipelines, each.direction, each.chunks, each.placement, None, is_shared)
        for each in layout(of)
        for is_shared in [each.model != "critic"]
    )


def heads_of(of):
    return {name: seconds for name, seconds in HEADS.items() if name in {each.name for each in of.models}}


def assert_in_one_order(rows, of):
    """Devices of a pipeline come to the same heads, in the same order."""
    came = defaultdict(set)
    for device, row in enumerate(rows):
        order = tuple(shared_head(each) for each in row if each.kind == "H")
        came[device].add(order)
    assert len(set.union(*came.values())) == 1
    count = sum(each.micro_batches for each in of.models if each.name in HEADS)
    assert len(next(iter(came[0]))) == count


@pytest.mark.parametrize("shape", PROBLEMS)
@pytest.mark.parametrize("stages", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_schedule_with_shared_heads_ends_on_every_backend(stages, shape):
    of = problem(stages, **PROBLEMS[shape])
    for _, rows in schedules(of):
        for made in (
            *(shared_heads.with_heads(of, rows, heads_of(of), patient) for patient in (False, True)),
            shared_heads.best(of, rows, heads_of(of)),
        ):
            check_deadlock(made, shared(of))
            assert_in_one_order(made, of)


@pytest.mark.slow
@given(st.integers(2, 5), st.integers(1, 7), st.lists(st.floats(0.1, 9), min_size=10, max_size=10), st.floats(0.01, 20))
@settings(max_examples=60, deadline=None)
def test_whatever_operations_take_schedules_end_and_keep_their_orders(stages, micro_batches, seconds, head):
    forward, backward = tuple(seconds[:stages]), tuple(seconds[5 : 5 + stages])
    models = [
        Model(name, stages, micro_batches, forward, backward, direction=way)
        for name, way in (("actor", "down"), ("critic", "up"))
    ]
    of, heads = Problem(stages, (*models, Model("ref", stages, 2, forward, None))), {"actor": head, "ref": head / 3}
    for _, rows in schedules(of):
        for patient in (False, True):
            made = shared_heads.with_heads(of, rows, heads, patient)
            check_deadlock(made, shared(of))
            assert tuple(tuple(each for each in row if each.kind != "H") for row in made) == rows
            timed(of, made, shared_heads.duration(of, heads))


@pytest.mark.parametrize("stages, layers, gain", [(4, 6, 1.14), (8, 3, 1.9)])
def test_a_wide_head_is_sooner_done_by_all_devices(stages, layers, gain):
    """24 layers and a head worth 9.1 of them, against stages of equal cost, where the last is the head alone; devices
    wait for each other only while the pipeline fills and empties, which takes half as much memory more than 1F1B."""
    count = 2 * stages
    even, heads = tuple(float(layers) for _ in range(stages)), {"actor": 3 * 9.1 / stages}
    of = Problem(stages, (Model("actor", stages, count, even, tuple(2 * each for each in even)),), memory_cap=1.5)
    rows = tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(of))
    times = timed(of, shared_heads.best(of, rows, heads), shared_heads.duration(of, heads))
    assert max(peaks(of, times)) <= 1.5 * of.memory_unit
    took = max(row[-1].end for row in times)
    by_cost = Pipelines("actor", stages).balanced(([1.0] * 24, 0.0, 9.1))
    cut = (*map(float, by_cost[:-1]), by_cost[-1] + 9.1)
    alone = Problem(stages, (Model("actor", stages, count, cut, tuple(2 * each for each in cut)),))
    assert serial_1f1b(alone) > gain * took
    last = times[-1]
    assert sum(after.start - before.end for before, after in pairwise(last)) == pytest.approx(0)


def test_heads_within_memory_are_those_of_1f1b_where_there_is_no_more():
    even = (3.0,) * 4
    of = Problem(4, (Model("actor", 4, 8, even, (6.0,) * 4),), memory_cap=1.0)
    rows = tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(of))
    times = timed(of, shared_heads.best(of, rows, HEADS), shared_heads.duration(of, HEADS))
    assert max(peaks(of, times)) <= of.memory_unit * (1 + 1e-9)


def test_a_planner_puts_heads_where_devices_share_them_and_times_them():
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
        assert took == pytest.approx([0.2] * 7)  # what waits for the other device is no work
    assert plan.seconds < plan.serial_s


def test_all_devices_take_as_long_for_a_head_as_the_slowest():
    planner = Planner(2, vocabulary=True)
    planner.replan([1.0, 2.0])
    for stage in (0, 1):
        for kind, seconds in {"F": 0.1, "B": 0.2, "H": 0.4 - 0.2 * stage}.items():
            planner.learn(Operation("actor", 0, stage, 0, kind), seconds)  # over the device's rate
    plan = planner.plan({"actor": 3}, {})
    for row, times in zip(plan.rows, plan.times, strict=True):
        took = [end - start for each, (start, end) in zip(row, times, strict=True) if each.kind == "H"]
        assert took == pytest.approx([0.4] * 3)


@pytest.mark.parametrize("chunks, placement", [(1, "v"), (2, "v"), (2, "interleaved")])
def test_passes_alone_end_too(chunks, placement):
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
def test_heads_that_devices_do_not_come_to_alike_are_refused(reason):
    with pytest.raises(ScheduleError, match=reason):
        check_deadlock(WRONG[reason], (Pipelines("actor", 2, vocabulary=True),))
    with pytest.raises(ScheduleError, match="is computed by 2 devices"):
        check_deadlock((FIRST, LAST), (Pipelines("actor", 2),))
