"""Sharding of a batch of clips: complete, in order, at valid cuts, and optimal for contiguous runs."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfuse.video.sharding import ClipLoad, CostModel, UnitRange, cost, pool_size, shard

LOADS = st.lists(st.builds(ClipLoad, st.integers(1, 60), st.integers(1, 10**12)), max_size=12)


@pytest.mark.slow
@given(LOADS, st.integers(1, 40), st.integers(1, 7))
def test_every_unit_occurs_once_in_order_and_cuts_are_at_steps(loads, ranks, step):
    shards = shard(loads, ranks, step)
    assert len(shards) == ranks
    runs = [run for runs in shards for run in runs]
    units = [(run.clip, unit) for run in runs for unit in range(run.first, run.last)]
    assert units == [(clip, unit) for clip, load in enumerate(loads) for unit in range(load.units)]
    assert all(run.first % step == 0 for run in runs)
    assert all(run.last % step == 0 or run.last == loads[run.clip].units for run in runs)
    for runs in shards:  # a shard has at most one run of a clip
        assert all(one.clip < other.clip for one, other in pairwise(runs))


@pytest.mark.slow
@given(LOADS.filter(bool), st.integers(1, 40), st.integers(1, 7))
def test_heaviest_shard_is_within_a_step_of_the_mean(loads, ranks, step):
    heaviest_step = max(min(step, load.units) * load.unit_cost for load in loads)
    total = sum(load.units * load.unit_cost for load in loads)
    assert max(cost(runs, loads) for runs in shard(loads, ranks, step)) <= total / ranks + heaviest_step


@pytest.mark.slow
@given(
    st.lists(st.builds(ClipLoad, st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_sharding_is_optimal_for_contiguous_runs(loads, ranks, step):
    atoms = [min(step, load.units - first) * load.unit_cost for load in loads for first in range(0, load.units, step)]
    cuts = combinations(range(1, len(atoms)), min(ranks, len(atoms)) - 1)
    best = min(max(sum(atoms[a:b]) for a, b in pairwise((0, *places, len(atoms)))) for places in cuts)
    assert max(cost(runs, loads) for runs in shard(loads, ranks, step)) == best


def test_more_ranks_than_frames_leaves_ranks_idle():
    assert shard([ClipLoad(2, 5), ClipLoad(1, 5)], 5) == [
        [UnitRange(0, 0, 1)],
        [UnitRange(0, 1, 2)],
        [UnitRange(1, 0, 1)],
        [],
        [],
    ]


def test_a_large_frame_outweighs_many_small_ones():
    model = CostModel(per_patch=100, per_pair=1)
    loads = [ClipLoad(1, model.unit(1000)), ClipLoad(100, model.unit(16))]
    assert shard(loads, 2) == [[UnitRange(0, 0, 1)], [UnitRange(1, 0, 100)]]
    assert model.unit(1000) == 1_100_000


def test_the_encoder_pool_is_as_small_as_the_time_allows():
    assert pool_size(10.0, 5.0, 8) == 3
    assert pool_size(10.0, 5000.0, 8) == 1
    assert pool_size(10.0, 0.1, 8) == 8
    assert pool_size(0.0, 5.0, 8) == pool_size(10.0, 0.0, 8) == 8, "times are not known yet"
