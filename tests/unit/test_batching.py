import random
from statistics import mean

from rlfuse.engines.trainer.micro_batches import balance, pack, split_evenly
from rlfuse.engines.trainer.sequence_parallel_packing import Unit, plan


def micro_batches(lengths, ranks, token_budget, most=None, lockstep=False):
    """Return row indices as [rank][micro-batch][row]."""
    units = [Unit((i,), tokens, 0.0) for i, tokens in enumerate(lengths)]
    shares = plan(units, ranks, token_budget, most=most, lockstep=lockstep)
    return [[list(share.rows) for share in shares_of_rank] for shares_of_rank in shares]


def test_rows_are_assigned_once_within_budget_and_lockstep_counts_match():
    for seed in range(50):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 60))]
        ranks, budget, most = rng.randint(1, 5), rng.randint(50, 600), rng.choice([None, 1, 3])
        lockstep = rng.random() < 0.5
        plan = micro_batches(lengths, ranks, budget, most, lockstep)
        assert sorted(i for rank in plan for bin in rank for i in bin) == list(range(len(lengths)))
        assert len({len(rank) for rank in plan}) == 1 if lockstep else all(bin for rank in plan for bin in rank)
        for bin in (bin for rank in plan for bin in rank):
            assert sum(lengths[i] for i in bin) <= budget or len(bin) == 1
            assert most is None or len(bin) <= most


def test_loads_differ_by_less_than_the_longest_row():
    lengths = [900, 30, 30, 400, 500, 20, 10, 10]
    loads = [sum(lengths[i] for i in share) for share in balance(lengths, 2)]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= 100


def test_first_fit_decreasing_fills_bins():
    assert pack([6, 5, 4, 3, 2], token_budget=10) == [[0, 2], [1, 3, 4]]


def test_surplus_ranks_are_idle_or_have_empty_micro_batches():
    assert micro_batches([4], ranks=3, token_budget=8) == [[[0]], [], []]
    assert micro_batches([4], ranks=3, token_budget=8, lockstep=True) == [[[0]], [[]], [[]]]


def one_forward_one_backward(seconds, stages):
    """Return the makespan of a 1F1B pipeline, in seconds; a backward pass takes 2x its forward pass."""
    count, ends, clocks, at = len(seconds), {}, [0.0] * stages, [0] * stages
    orders = []
    for ahead in (min(stages - stage - 1, count) for stage in range(stages)):
        order = [("forward", i) for i in range(ahead)]
        for i in range(count):
            order += [("forward", ahead + i)] * (ahead + i < count) + [("backward", i)]
        orders.append(order)
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                kind, i = orders[stage][at[stage]]
                before = (kind, i, stage - 1 if kind == "forward" else stage + 1)
                if 0 <= before[2] < stages and before not in ends:
                    break
                begin = max(clocks[stage], ends.get(before, 0.0))
                clocks[stage] = ends[kind, i, stage] = begin + seconds[i] * (1 if kind == "forward" else 2)
                at[stage] += 1
    return max(clocks)


def test_pipelines_are_faster_with_small_micro_batches_at_both_ends():
    assert split_evenly([9, 5, 4, 1], 1, 3) == [[[1], [0], [2, 3]]]
    assert one_forward_one_backward([1.0] * 4, 2) == 4 * 3 + 3
    rng, speedups = random.Random(0), []
    for _ in range(50):
        lengths = [rng.randint(20_000, 90_000) for _ in range(rng.randint(2, 6))] + [300] * 60
        [micro_batches] = split_evenly(lengths, 1, 8)
        tokens = [sum(lengths[i] for i in bin) for bin in micro_batches]
        largest_first = one_forward_one_backward(sorted(tokens, reverse=True), 4)
        speedups.append(largest_first / one_forward_one_backward(tokens, 4))
    assert mean(speedups) > 1.05
