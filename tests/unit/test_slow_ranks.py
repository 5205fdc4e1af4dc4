"""Training on slots of unequal speed: distribution of rows and layers, and pipeline schedules."""

import asyncio
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
from published_schedules import parse

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.partition import balanced, stage_costs
from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer
from rlfuse.engines.pipeline.slow_devices import device_costs, operation_slowdowns, pipeline_rates, repartition
from rlfuse.engines.trainer.micro_batches import balance, split_evenly
from rlfuse.engines.trainer.sequence_parallel_packing import Costs, Unit, fill, plan, unit_per_row
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.fusion.schedules.baselines import BASELINES, baseline
from rlfuse.fusion.schedules.bound import lower_bound
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.planning import Planner
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import timed
from rlfuse.fusion.schedules.search import search
from rlfuse.samples import Row

ACTOR, CRITIC = Pipelines("actor", 2), Pipelines("critic", 2, direction="up")
TWELVE = {model: ([1.0] * 12, 0.0, 0.0) for model in ("actor", "critic")}
"""(costs of layers, cost of the embedding, cost of the head) of each model."""


def rows_of(*lengths):
    return [Row(np.zeros(1, np.int32), np.zeros(length - 1, np.int32)) for length in lengths]


def tokens_of(shares, rows):
    """Return the tokens as [rank][micro-batch]."""
    return [[sum(rows[i].tokens for i in share.rows) for share in mine] for mine in shares]


def divisions(count, ranks):
    """Return all divisions of `count` equal units among the ranks."""
    if ranks == 1:
        return [(count,)]
    return [(first, *rest) for first in range(count + 1) for rest in divisions(count - first, ranks - 1)]


def test_division_of_equal_units_is_optimal():
    """Compare with all divisions, the search space of an integer programme."""
    for seed in range(200):
        rng = random.Random(seed)
        ranks, count = rng.randint(2, 4), rng.randint(1, 12)
        rates = tuple(round(rng.uniform(1, 4), 2) for _ in range(ranks))
        best = min(max(map(math.prod, zip(rates, each, strict=True))) for each in divisions(count, ranks))
        planned = [len(mine) for mine in plan(unit_per_row(rows_of(*[9] * count)), ranks, 9, costs=Costs(rates=rates))]
        for counts in (planned, list(map(len, balance([9] * count, ranks, rates)))):
            assert sum(counts) == count
            assert max(map(math.prod, zip(rates, counts, strict=True))) == pytest.approx(best), (rates, counts)


def test_in_lockstep_a_slow_rank_has_the_same_number_of_smaller_micro_batches():
    # The slowest rank of each micro-batch is within one row of the optimum for divisible rows.
    rows = rows_of(*[10] * 96)
    for rates in ((1.0, 1.0), (1.0, 3.0), (1.0, 1.0, 1.5, 2.5)):
        shares = plan(unit_per_row(rows), len(rates), 120, costs=Costs(rates=rates), lockstep=True)
        tokens = tokens_of(shares, rows)
        assert len(set(map(len, tokens))) == 1 and all(map(all, tokens))
        assert sorted(i for mine in shares for share in mine for i in share.rows) == list(range(96))
        took = sum(max(map(math.prod, zip(rates, step, strict=True))) for step in zip(*tokens, strict=True))
        ideal = 960 / sum(1 / rate for rate in rates)
        assert took <= ideal + len(tokens[0]) * 10 * max(rates)


def test_a_rank_too_slow_for_any_row_runs_fillers():
    rows = rows_of(10, 10, 12)
    shares = plan(unit_per_row(rows), 2, 12, costs=Costs(rates=(1.0, 9.0)), lockstep=True)
    batches = fill(shares, rows)
    assert [[each.weight for each in mine] for mine in batches] == [[1.0] * 3, [0.0] * 3]
    assert all(each.rows[0].tokens == 2 for each in batches[1])


def test_ranks_that_share_a_row_have_the_rate_of_the_slowest():
    costs = Costs(rates=(1.0, 1.0, 4.0, 1.0))
    shares = plan([Unit((i,), 80, 0.0) for i in range(2)], 4, 40, (1, 2), costs)
    assert [[share.rows for share in mine] for mine in shares] == [[(0,), (1,)]] * 2 + [[], []]


def test_calls_on_all_slots_are_divided_by_slot_rates_and_calls_on_one_slot_evenly():
    config = Config()
    config.rollout.tensor_model_parallel_size = 2
    group = TrainerGroup(config, [None] * 4)
    rows = rows_of(*[10] * 60)

    def counts(slot):
        return [sum(len(share.rows) for share in mine) for mine in group._plan(rows, slot, 2)]

    asyncio.run(group.replan([1.0, 2.0]))
    assert counts(None) == [20, 20, 10, 10] and counts(1) == [30, 30]
    asyncio.run(group.replan([]))
    assert counts(None) == [15] * 4


# Schedules -----------------------------------------------------------------------------------------------------------

UNEVEN = {
    "devices": 4,
    "models": [
        {"name": "actor", "stages": 4, "micro_batches": 6, "forward": [3, 3, 3, 4], "backward": 6},
        {
            "name": "critic", "stages": 2, "pipelines": 2, "micro_batches": 3, "forward": 2, "backward": 4,
            "direction": "up", "chunks_per_device": 2,
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_the_schedule_search_uses_the_rates_of_devices(split):
    # The bound and the timed rows verify the result independently of the search.
    even = parse(UNEVEN | {"split_backward": split})
    slow = parse(UNEVEN | {"split_backward": split, "rates": [1, 1, 2.5, 1]})
    critic = slow.models[1]
    assert [slow.duration(critic, pipeline, 0, "F") for pipeline in (0, 1)] == [1, 1]
    assert [slow.duration(critic, pipeline, 1, "F") for pipeline in (0, 1)] == [1, 2.5]
    found = search(slow, time_limit=2.0, method="improve")
    assert found.lower_bound >= 2.5 * 6 * 9 + 2.5 * 3 * 6  # the slow device is never idle
    assert found.lower_bound * (1 - 1e-9) <= found.makespan <= 1.1 * found.lower_bound
    ignoring_rates = search(even, time_limit=2.0, method="improve")
    assert found.makespan <= max(row[-1].end for row in timed(slow, ignoring_rates.operations))
    assert baseline(slow, "1f1b", barrier=False) >= found.makespan


def test_rates_multiply_durations():
    """Compare a problem with rates to the same problem with multiplied durations."""
    model = Model("actor", 3, 5, (1.0, 2.0, 3.0), (2.0, 4.0, 6.0))
    written = Model("actor", 3, 5, (1.0, 4.0, 9.0), (2.0, 8.0, 18.0))
    rated, plain = Problem(3, (model,), rates=(1.0, 2.0, 3.0)), Problem(3, (written,))
    assert lower_bound(rated) == lower_bound(plain)
    for name in BASELINES:
        assert baseline(rated, name, barrier=True) == baseline(plain, name, barrier=True)


# Layers of pipelines --------------------------------------------------------------------------------------------------


def cuts(layers, stages):
    """Yield all divisions of layers into stages; the last stage may have none."""
    for ends in itertools.combinations_with_replacement(range(1, layers + 1), stages - 1):
        sizes = [b - a for a, b in itertools.pairwise((0, *ends, layers))]
        if all(sizes[:-1]):
            yield tuple(sizes)


def test_division_of_layers_into_stages_is_optimal():
    for seed in range(200):
        rng = random.Random(seed)
        stages, layers = rng.randint(2, 4), rng.randint(4, 10)
        costs = [rng.choice([1.0, 1.0, rng.uniform(0.5, 2)]) for _ in range(layers)], rng.random(), 2 * rng.random()
        rates = [rng.choice([1.0, rng.uniform(1, 4)]) for _ in range(stages)]
        most = [rng.randint(max(1, layers // stages), layers) for _ in range(stages)]

        def slowest(sizes, costs=costs, rates=rates):
            return max(map(math.prod, zip(stage_costs(sizes, *costs), rates, strict=True)))

        fitting = [sizes for sizes in cuts(layers, stages) if all(a <= b for a, b in zip(sizes, most, strict=True))]
        if not fitting:
            with pytest.raises(ValueError, match=rf"{layers} layers don't fit: the stages have memory for"):
                balanced(*costs, stages, rates, most)
            continue
        found = balanced(*costs, stages, rates, most)
        assert found in fitting and slowest(found) == pytest.approx(min(map(slowest, fitting)))


@pytest.mark.parametrize(
    "rates, room, layers",
    [
        ([1, 1], None, [(6, 6), (6, 6)]),
        ([1, 2], None, [(8, 4), (4, 8)]),  # the critic has the opposite direction
        ([1, 2], [1, 9], [(7, 5), (5, 7)]),  # memory for one more layer
        ([1, 1.05], None, [(6, 6), (6, 6)]),
        ([1, 2, 1, 2], None, [(8, 4), (4, 8)]),
        ([1, 1, 1, 2], None, [(6, 6), (6, 6)]),  # one of two pipelines: fewer rows are as good
        ([1] * 7 + [2], None, [(6, 6), (6, 6)]),  # one of four pipelines: fewer rows are better
    ],
)
def test_layers_move_off_slow_devices_if_that_is_faster(rates, room, layers):
    cut = repartition([ACTOR, CRITIC], TWELVE, rates, room)
    assert [each.layers for each in cut] == layers
    assert repartition(cut, TWELVE, rates, room and [0, 0]) == cut
    assert [each.layers for each in repartition(cut, TWELVE, [1.0] * len(rates))] == [(6, 6)] * 2


def test_rows_are_divided_by_the_slowest_device_of_each_pipeline():
    layout, rates = [ACTOR, CRITIC], [1, 1, 1, 2]
    assert pipeline_rates(rates, device_costs(layout, TWELVE), 2) == [1, 2]
    assert pipeline_rates(rates, device_costs(repartition(layout, TWELVE, [1, 2]), TWELVE), 2) == [1, 1]
    bins = split_evenly([10] * 12, 2, 4, [1, 2])
    assert [[len(bin) for bin in pipeline] for pipeline in bins] == [[2, 2, 2, 2], [1, 1, 1, 1]]
    assert operation_slowdowns(rates, [1, 2]) == pytest.approx([4 / 3, 4 / 3, 2 / 3, 4 / 3])  # fewer but longer rows


def measure(planner, plan, slow=1.0):
    """Record the duration of every operation; all devices but the first are slower by the factor `slow`."""
    for device, row in enumerate(plan.rows):
        for each in row:
            planner.learn(plan.planned_operation(each), {"F": 0.01, "B": 0.02}[each.kind] * (slow if device else 1.0))


def test_a_planner_predicts_durations_of_a_slow_device_before_measurements(monkeypatch):
    planner, searched = Planner(2), []
    search = planner._search
    monkeypatch.setattr(planner, "_search", lambda problem: searched.append(problem) or search(problem))
    work = {"actor": 4, "critic": 4}
    planner.replan([1.0, 1.0])
    measure(planner, planner.plan(work), slow=1.15)
    before = planner.plan(work)
    measure(planner, before, slow=2.0)  # it became slow, but its rate is not known yet
    planner.replan([1.0, 2.0])
    after = planner.plan(work)
    assert after.serial_s == pytest.approx(0.27 + 0.25) and after.seconds >= 8 * 0.06
    assert searched[-1].rates == (1.0, 2.0) and len(searched) == 2
    measure(planner, after)
    planner.replan([1.0, 2.0])
    assert planner.plan(work).rows == after.rows and len(searched) == 2
    planner.replan([1.0, 1.0])
    assert planner.plan(work).seconds == pytest.approx(before.seconds, rel=0.2) and len(searched) == 3


class Ranks(PipelineTrainer):
    """A pipeline trainer without processes that records calls."""

    def __init__(self, ranks, room):
        super().__init__(Config(), [None] * ranks)
        self.planner, self.calls, self.room = Planner(2), [], room

    async def _all(self, method, action, *arguments):
        self.calls.append(method)
        answers = {"setup": {"costs": TWELVE}, "free_layers": self.room, "load": None}
        return [answers[method]] * len(self.ranks)


async def test_layers_move_only_with_a_checkpoint_and_free_memory(tmp_path):
    for room, layers in ((9, (8, 4)), (0, (6, 6))):
        group = Ranks(2, room)
        await group.setup([ACTOR, CRITIC])
        await group.replan([1.0, 2.0])
        assert group.layout["actor"].layers == (6, 6) and group.planner._rates == (1.0, 2.0)
        await group.replan([1.0, 2.0], Path(tmp_path))
        assert group.layout["actor"].layers == layers
        assert group.calls == ["setup", "free_layers"] + (["setup", "load"] if room else [])
        group.calls.clear()
        await group.replan([1.0, 2.0], Path(tmp_path))
        assert "setup" not in group.calls


@pytest.mark.parametrize("took, layers", [((10.0, 20.0), (9, 3)), ((10.0, 10.5), (6, 6)), ((10.0, 5.0), (6, 6))])
async def test_layers_move_by_measured_stage_times(tmp_path, took, layers):
    # Only the actor moves, as the critic has no measurements.
    group = Ranks(2, 9)
    await group.setup([ACTOR, CRITIC])
    await group.replan([], tmp_path)
    for stage, seconds in enumerate(took):
        for kind, share in (("F", 1 / 3), ("B", 2 / 3)):
            group.planner.learn(Operation("actor", 0, stage, 0, kind), share * seconds)
    await group.replan([], tmp_path)
    assert group.layout["actor"].layers == layers and group.layout["critic"].layers == (6, 6)
    calls = len(group.calls)
    await group.replan([], tmp_path)  # no new measurements
    assert "setup" not in group.calls[calls:] and group.layout["actor"].layers == layers
