"""No generated schedule deadlocks on gloo or NCCL; a deadlock is reported before ranks get the schedule."""

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
    """The critic in `pipelines` shorter ones, if given; `scored` micro-batches of the reference fill bubbles."""
    made = []
    for name in models:
        copies = (pipelines or 1) if name == "critic" else 1
        count = micro_batches or 2 * stages
        made.append(Model(name, stages // copies, count, 1.0, 2.0, copies, direction=MODELS[name]))
    if scored:
        made.append(Model("ref", stages, scored, 1.0, None))
    return Problem(stages, tuple(made), split_backward=split, chunks_per_device=chunks, placement=placement)


def layout(of):
    """Its models as ranks hold them."""
    return tuple(
        Pipelines(each.name, each.stages, each.pipelines, each.direction, of.chunks(each), of.placement)
        for each in of.models
    )


def serial_1f1b(of):
    return to_rows(of, dict(baseline_orders(of))["serial 1f1b"])


def schedules(of):
    """Every baseline, and the best of some list schedules, which runs all models at once."""
    yield from ((name, to_rows(of, order)) for name, order in baseline_orders(of))
    yield "fused", search(of, method="list", time_limit=0.05).operations


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
def test_every_schedule_ends_on_every_backend(stages, shape):
    given_problem = problem(stages, **PROBLEMS[shape])
    for name, rows in schedules(given_problem):
        made = programs(rows, layout(given_problem))
        assert {backend: find_deadlock(made, queue) for backend, queue in QUEUES.items()} == {"gloo": {}, "nccl": {}}, (
            name
        )


@pytest.mark.parametrize("stages, pipelines", [(4, 2), (8, 2), (8, 4)])
def test_short_pipelines_beside_a_long_one_end(stages, pipelines):
    given_problem = problem(stages, pipelines=pipelines, split=True)
    for name, rows in schedules(given_problem):
        made = programs(rows, layout(given_problem))
        assert {backend: find_deadlock(made, queue) for backend, queue in QUEUES.items()} == {"gloo": {}, "nccl": {}}, (
            name
        )


def group_of_kind(transfer):
    """One communicator for all ranks: model, F or B, half of the V. How it was."""
    return transfer.lane.model, transfer.lane.kind, transfer.lane.returning


def posted_regardless(made):
    """Receives LOOKAHEAD operations early, also of what comes of this device's own later operations. How it was."""
    sent = defaultdict(list)
    for step in (step for program in made for step in program):
        if step.output is not None and not step.output.local:
            sent[step.output.lane].append(step.output)
    result = []
    for program in made:
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
    made = posted_regardless(programs(rows, layout(given_problem)))
    stuck = find_deadlock(made, group_of_kind)
    assert bool(stuck) == (stages > 2)
    assert all(operation in rows[device] for device, operation in stuck.items())
    assert not find_deadlock(made, QUEUES["gloo"])


def test_groups_alone_or_the_order_of_posting_alone_would_not_do():
    """From four stages on, devices also wait for each other where no receive is posted before its time; and whatever
    is posted, all of a device's calls in one stream never end: streams that aren't independent are a deadlock."""
    given_problem = problem(4)
    made = programs(serial_1f1b(given_problem), layout(given_problem))
    assert find_deadlock(made, group_of_kind)
    assert find_deadlock(made, lambda transfer: "one stream")
    assert not find_deadlock(made, QUEUES["nccl"])


@pytest.mark.slow
@given(st.integers(2, 6), st.sampled_from(sorted(PROBLEMS)), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_receives_are_few_in_the_order_of_sends_and_never_of_what_is_still_to_do(stages, shape, micro_batches):
    given_problem = problem(stages, **PROBLEMS[shape], micro_batches=micro_batches)
    rows = dict(schedules(given_problem))["fused"]
    made = programs(rows, layout(given_problem))
    before = {each: set(row[:i]) for row in rows for i, each in enumerate(row)}
    makers = {step.output.operation: step.operation for program in made for step in program if step.output}

    def comes_of(operation, seen):
        """All operations that must have run for this one's result."""
        stack = [operation]
        while stack:
            each = stack.pop()
            if each not in seen:
                seen.add(each)
                stack += [*before[each], *([makers[each]] if each in makers else [])]
        return seen

    for device, program in enumerate(made):
        sent = {lane: [] for lane in {each.lane for step in program for each in step.receives}}
        for each in (step.output for row in made for step in row if step.output and step.output.lane in sent):
            sent[each.lane].append(each.operation)
        receives = [(i, each) for i, step in enumerate(program) for each in step.receives]
        assert len(receives) == sum(map(len, sent.values()))
        for lane, order in sent.items():
            assert [each.operation for _, each in receives if each.lane == lane] == order
        for i, each in receives:
            assert each.operation not in rows[device][:i]
            later = set(rows[device][i:])
            assert not comes_of(makers[each.operation], set()) & later


def test_eight_stages_of_two_models_are_checked_in_milliseconds():
    """512 operations: some 15 ms on a slow core; the bound is for a busy machine."""
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
async def test_a_schedule_that_can_not_end_is_refused_before_any_rank_gets_it(reason):
    group = PipelineGroup(Config(), [])
    group.layout = {"actor": TWO[0]}
    with pytest.raises(EngineError, match=f"The schedule was not started.*{reason}"):
        await group.run(WRONG[reason], {})


def test_a_replay_that_does_not_end_names_each_device_and_its_operation(monkeypatch):
    given_problem = problem(4, ("actor",))
    rows = serial_1f1b(given_problem)
    monkeypatch.setitem(QUEUES, "nccl", group_of_kind)
    with pytest.raises(ScheduleError, match=r"deadlocks on nccl: device 0 at .* of actor\[0\] stage 0 micro-batch"):
        check_deadlock(rows, layout(given_problem))


@pytest.mark.parametrize("placement, chunks, pairs", [("v", 2, 28), ("interleaved", 2, 30), ("interleaved", 4, 31)])
def test_every_pair_of_every_block_has_its_lanes_and_no_device_more_than_cuda_runs_side_by_side(
    placement, chunks, pairs
):
    """Each has a stream, of torch's pool of 32, and wants a connection of its own; so does the computation."""
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
