import random

from rlfuse.engines.trainer.degrees import Unit, plan
from rlfuse.engines.trainer.micro_batches import balance, pack


def micro_batches(lengths, ranks, token_budget, most=None, lockstep=False):
    """Row indices as [rank][micro-batch][row]."""
    units = [Unit((i,), tokens, 0.0) for i, tokens in enumerate(lengths)]
    shares = plan(units, ranks, token_budget, most=most, lockstep=lockstep)
    return [[list(share.rows) for share in mine] for mine in shares]


def test_every_row_lands_once_within_budget_and_counts_agree_in_lockstep():
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


def test_balance_is_within_one_longest_row_of_even():
    lengths = [900, 30, 30, 400, 500, 20, 10, 10]
    loads = [sum(lengths[i] for i in share) for share in balance(lengths, 2)]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= 100


def test_first_fit_decreasing_fills_bins():
    assert pack([6, 5, 4, 3, 2], token_budget=10) == [[0, 2], [1, 3, 4]]


def test_fewer_rows_than_ranks_leaves_ranks_idle_or_with_empty_micro_batches():
    assert micro_batches([4], ranks=3, token_budget=8) == [[[0]], [], []]
    assert micro_batches([4], ranks=3, token_budget=8, lockstep=True) == [[[0]], [[]], [[]]]
