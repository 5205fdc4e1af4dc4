"""Generated schedules never deadlock on gloo or NCCL; a deadlock is reported before ranks receive the schedule."""

import time
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfuse.cluster.cuda import pipeline_settings
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_group import PipelineGroup
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules import transfers
from rlfuse.fusion.schedules.baselines import baseline_orders
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.search import search
from rlfuse.fusion.schedules.shop import to_rows
from rlfuse.fusion.schedules.transfers import QUEUES, check_deadlock, find_deadlock, lanes, programs

MODELS = {"actor": "down", "critic": "up"}


def problem(
    stages, models=tuple(MODELS), scored=0, split=False, chunks=1, micro_batches=None, pipelines=None, placement="v"
):
    """Return a problem with `pipelines` shorter pipelines of the critic and `scored` micro-batches of the reference."""
    parts = []
    for name in models:
        copies = (pipelines or 1) if name == "critic" else 1
        count = micro_batches or 2 * stages
        parts.append(Model(name, stages // copies, count, 1.0, 2.0, copies, direction=MODELS[name]))
    if scored:
        parts.append(Model("ref", stages, scored, 1.0, None))
    return Problem(stages, tuple(parts), split_backward=split, chunks_per_device=chunks, placement=placement)


def layout(given_problem):
    """Return the models of the problem as pipelines."""
    return tuple(
        Pipelines(
            each.name, each.stages, each.pipelines, each.direction, given_problem.chunks(each), given_problem.placement
        )
        for each in given_problem.models
    )


def serial_1f1b(given_problem):
    return to_rows(given_problem, dict(baseline_orders(given_problem))["serial 1f1b"])


def schedules(given_problem):
    """Yield every baseline and the best list schedule, which runs all models at once."""
    yield from ((name, to_rows(given_problem, order)) for name, order in baseline_orders(given_problem))
    yield "fused", search(given_problem, method="list", time_limit=0.05).operations


PROBLEMS = {
    "one model": dict(models=("actor",)),
    "two models": {},
    "backward split": dict(split=True),
    "passes in the bubbles": dict(scored=5, split=True),
    "V": dict(chunks=2, split=True),
    "V, backward whole": dict(chunks=2),
    "interleaved": dict(chunks=2, split=True, placement="interleaved"),
    "interleaved, backward whole": dict(chunks=2, placement="interleaved"),
    "three chunks of one model": dict(models=("actor",), chunks=3, placement="interleaved"),
}


@pytest.mark.parametrize("shape", PROBLEMS)
@pytest.mark.parametrize("stages", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 9))])
def test_schedules_end_on_every_backend(stages, shape):
    given_problem = problem(stages, **PROBLEMS[shape])
    for name, rows in schedules(given_problem):
        rank_programs = programs(rows, layout(given_problem))
        assert {backend: find_deadlock(rank_programs, queue) for backend, queue in QUEUES.items()} == {
            "gloo": {},
            "nccl": {},
        }, name


@pytest.mark.parametrize("stages, pipelines", [(4, 2), (8, 2), (8, 4)])
def test_schedules_of_short_and_long_pipelines_end(stages, pipelines):
    given_problem = problem(stages, pipelines=pipelines, split=True)
    for name, rows in schedules(given_problem):
        rank_programs = programs(rows, layout(given_problem))
        assert {backend: find_deadlock(rank_programs, queue) for backend, queue in QUEUES.items()} == {
            "gloo": {},
            "nccl": {},
        }, name


def group_of_kind(transfer):
    """Return the former queue: one communicator for all ranks per model, kind (F, B) and half of the V."""
    return transfer.lane.model, transfer.lane.kind, transfer.lane.returning


def with_early_receives(rank_programs):
    """Post receives LOOKAHEAD operations early, even for results that depend on later operations of the device."""
    sent = defaultdict(list)
    for step in (step for program in rank_programs for step in program):
        if step.output is not None and not step.output.local:
            sent[step.output.lane].append(step.output)
    result = []
    for program in rank_programs:
        queues, known, steps = {lane: list(each) for lane, each in sent.items()}, set(), []
        for position, step in enumerate(program):
            receives = []
            for later in program[position : position + 1 + transfers.LOOKAHEAD]:
                if later.input is not None and not later.input.local:
                    while later.operation not in known:
                        receives.append(queues[later.input.lane].pop(0))
                        known.add(receives[-1].operation)
            steps.append(replace(step, receives=tuple(receives)))
        result.append(tuple(steps))
    return tuple(result)


@pytest.mark.parametrize("models", [("actor",), ("actor", "critic")])
@pytest.mark.parametrize("stages", range(2, 9))
def test_one_group_for_all_ranks_deadlocks_over_nccl_from_three_stages_on(stages, models):
    given_problem = problem(stages, models)
    rows = serial_1f1b(given_problem)
    rank_programs = with_early_receives(programs(rows, layout(given_problem)))
    stuck = find_deadlock(rank_programs, group_of_kind)
    assert bool(stuck) == (stages > 2)
    assert all(operation in rows[device] for device, operation in stuck.items())
    assert not find_deadlock(rank_programs, QUEUES["gloo"])


def test_separate_groups_and_ordered_receives_are_both_needed():
    # With one group, devices deadlock from four stages on even without early receives; with one stream, always.
    given_problem = problem(4)
    rank_programs = programs(serial_1f1b(given_problem), layout(given_problem))
    assert find_deadlock(rank_programs, group_of_kind)
    assert find_deadlock(rank_programs, lambda transfer: "one stream")
    assert not find_deadlock(rank_programs, QUEUES["nccl"])


@pytest.mark.slow
@given(st.integers(2, 6), st.sampled_from(sorted(PROBLEMS)), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_receives_are_in_the_order_of_sends_and_independent_of_later_operations(stages, shape, micro_batches):
    given_problem = problem(stages, **PROBLEMS[shape], micro_batches=micro_batches)
    rows = dict(schedules(given_problem))["fused"]
    rank_programs = programs(rows, layout(given_problem))
    before = {each: set(row[:i]) for row in rows for i, each in enumerate(row)}
    makers = {step.output.operation: step.operation for program in rank_programs for step in program if step.output}

    def dependencies(operation, seen):
        """Return all operations that the result of `operation` depends on."""
        stack = [operation]
        while stack:
            each = stack.pop()
            if each not in seen:
                seen.add(each)
                stack += [*before[each], *([makers[each]] if each in makers else [])]
        return seen

    for device, program in enumerate(rank_programs):
        sent = {lane: [] for lane in {each.lane for step in program for each in step.receives}}
        for each in (step.output for row in rank_programs for step in row if step.output and step.output.lane in sent):
            sent[each.lane].append(each.operation)
        receives = [(i, each) for i, step in enumerate(program) for each in step.receives]
        assert len(receives) == sum(map(len, sent.values()))
        for lane, order in sent.items():
            assert [each.operation for _, each in receives if each.lane == lane] == order
        for i, each in receives:
            assert each.operation not in rows[device][:i]
            later = set(rows[device][i:])
            assert not dependencies(makers[each.operation], set()) & later


def test_eight_stages_of_two_models_are_checked_in_milliseconds():
    # 512 operations take about 15 ms on a slow core; the bound allows for a busy machine.
    given_problem = problem(8)
    rows = dict(schedules(given_problem))["fused"]
    programs.cache_clear()
    began = time.process_time()
    check_deadlock(rows, layout(given_problem))
    assert time.process_time() - began < 3


def operation(stage, micro_batch, kind="F"):
    return Operation("actor", 0, stage, micro_batch, kind)


TWO = (Pipelines("actor", 2),)
F0 = tuple((operation(stage, 0),) for stage in (0, 1))
WRONG = {
    "deadlocks: device 0 at B of .* micro-batch 1; device 1 at F of .* micro-batch 0": (
        (operation(0, 1), operation(0, 1, "B"), operation(0, 0), operation(0, 0, "B")),
        (operation(1, 0), operation(1, 0, "B"), operation(1, 1), operation(1, 1, "B")),
    ),
    "stage 1 micro-batch 0 needs the result of F of .* stage 0 micro-batch 0, which is not in": ((), F0[1]),
    "Nothing in the schedule takes the result of F of .* stage 0": (F0[0], ()),
    "is in row 1, but its stage is on device 0": ((), F0[0]),
    "in the schedule twice": ((*F0[0], *F0[0]), F0[1]),
    "B of .* stage 1 micro-batch 0 comes before its F": (
        (*F0[0], operation(0, 0, "B")),
        (operation(1, 0, "B"), *F0[1]),
    ),
    r"the layout has only \['actor'\]": ((Operation("critic", 0, 0, 0, "F"),), ()),
}


@pytest.mark.parametrize("reason", WRONG)
async def test_an_invalid_schedule_is_rejected_before_any_rank_receives_it(reason):
    group = PipelineGroup(Config(), [])
    group.layout = {"actor": TWO[0]}
    with pytest.raises(EngineError, match=f"The schedule was not started.*{reason}"):
        await group.run(WRONG[reason], {})


def test_a_deadlock_in_the_replay_is_reported_with_each_device_and_operation(monkeypatch):
    given_problem = problem(4, ("actor",))
    rows = serial_1f1b(given_problem)
    monkeypatch.setitem(QUEUES, "nccl", group_of_kind)
    with pytest.raises(ScheduleError, match=r"deadlocks on nccl: device 0 at .* of actor\[0\] stage 0 micro-batch"):
        check_deadlock(rows, layout(given_problem))


@pytest.mark.parametrize("placement, chunks, pairs", [("v", 2, 28), ("interleaved", 2, 30), ("interleaved", 4, 31)])
def test_all_pairs_have_lanes_within_the_number_of_cuda_connections(placement, chunks, pairs):
    # Each lane needs a stream of torch's pool of 32 and a connection, as does the computation.
    ways = (*MODELS.items(), ("ref", "down"))
    three = [Pipelines(name, 8, chunks=chunks, direction=way, placement=placement) for name, way in ways]
    found = [lane for each in three for lane in lanes(each)]
    assert len(found) == len(set(found)) == 3 * pairs  # neighbours, F and B, first chunk or not
    assert all((lane.sender - lane.receiver) % 8 in (1, 7) for lane in found)
    most = max(sum(device in (lane.sender, lane.receiver) for lane in found) for device in range(8))
    connections = {each.name: each.value for each in pipeline_settings()}["CUDA_DEVICE_MAX_CONNECTIONS"]
    assert most + 1 < int(connections) == 32
    assert lanes(Pipelines("actor", 1, 2, chunks=2)) == []
    two = lanes(Pipelines("critic", 2, 2, "up"))
    assert {(lane.kind, lane.sender, lane.receiver) for lane in two} == {
        *(("F", 1, 0), ("F", 3, 2), ("B", 0, 1), ("B", 2, 3))
    }
