import random
from collections import Counter

import numpy as np
import pytest

from rlfuse.engines.batching import micro_batches
from rlfuse.engines.degrees import Costs, alone, legal, plan, together
from rlfuse.samples import Row


def row(prompt, response, group=0):
    return Row(np.full(prompt, group, dtype=np.int32), np.zeros(response, dtype=np.int32))


def random_rows(rng):
    return [row(rng.choice([3, 40, 300]), rng.randint(1, 200), rng.randint(0, 6)) for _ in range(rng.randint(1, 40))]


def test_every_row_runs_once_on_aligned_ranks_that_meet_in_one_order():
    for seed in range(60):
        rng = random.Random(seed)
        rows, ranks, budget = random_rows(rng), rng.choice([4, 8]), rng.randint(50, 600)
        most, lockstep = rng.choice([None, 1, 3]), rng.random() < 0.5
        degrees = legal(rng.choice([1, 2, 4]))
        units = rng.choice([alone, lambda rows: together(rows, budget * degrees[-1], ranks, most)])(rows)  # noqa: B023
        found = plan(units, ranks, budget, degrees, Costs(rng.random() / 100, rng.random(), 20), most, lockstep)
        assert len({len(shares) for shares in found}) == 1 or not lockstep
        times = Counter(i for shares in found for share in shares for i in set(share.rows))
        for first in range(0, ranks, degrees[-1]):
            for rank in range(first, first + degrees[-1]):
                for at, share in enumerate(found[rank]):
                    begin = rank // share.degree * share.degree
                    assert all(found[peer][at] == share for peer in range(begin, begin + share.degree))
                    assert all(times[i] == share.degree for i in share.rows)
                    tokens = sum(unit.tokens for unit in units if set(unit.rows) <= set(share.rows))
                    one = any(set(unit.rows) == set(share.rows) for unit in units)
                    assert tokens <= budget * share.degree or (one and share.degree == degrees[-1])
                    assert most is None or len(share.rows) <= most
        assert set(times) == set(range(len(rows)))


def test_without_slices_the_plan_is_that_of_balanced_micro_batches():
    for seed in range(30):
        rng = random.Random(seed)
        rows, ranks, budget = random_rows(rng), rng.randint(1, 5), rng.randint(50, 600)
        found = plan(alone(rows), ranks, budget, lockstep=True)
        wanted = micro_batches([each.tokens for each in rows], ranks, budget, lockstep=True)
        assert [[list(share.rows) for share in shares] for shares in found] == wanted


@pytest.mark.parametrize(
    "tokens, ranks, budget, costs, degrees",
    [
        ([100], 4, 1000, Costs(), {4}),  # others would idle
        ([100], 4, 1000, Costs(start=80.0), {1}),  # meeting costs more than it saves
        ([100, 100], 4, 1000, Costs(start=20.0), {2}),  # 100 on one rank each, 70 on two, 90 on all one after the other
        ([100], 4, 30, Costs(start=1e9), {4}),  # nothing else fits
        ([100] * 8, 4, 1000, Costs(), {1}),  # all ranks have work without
        ([900, 100, 100, 100], 4, 1000, Costs(start=30.0), {4, 1}),
        ([9] * 40, 4, 100, Costs(exchange=0.5), {1}),
    ],
)
def test_the_degree_is_the_smallest_that_fits_and_is_soonest_done(tokens, ranks, budget, costs, degrees):
    found = plan(alone([row(1, size - 1) for size in tokens]), ranks, budget, legal(4), costs)
    assert {share.degree for shares in found for share in shares} == degrees


def test_a_prompt_runs_once_unless_its_answers_outgrow_it():
    group = [row(1000, 50) for _ in range(8)]
    (unit,) = together(group, capacity=10_000, ranks=4)
    assert (unit.tokens, unit.pairs) == (1400, 1000**2 / 2 + 8 * 50 * 1025)
    assert [unit.tokens for unit in together(group, capacity=1200, ranks=4)] == [1200, 1200]
    assert [len(unit.rows) for unit in together(group, capacity=10_000, ranks=4, most=3)] == [3, 3, 2]
    assert [unit.tokens for unit in together(group, capacity=900, ranks=4)] == [1050] * 8  # more than the budget: alone
    short = [row(10, 100) for _ in range(8)]
    assert len(together(short, capacity=10_000, ranks=4)) == 4
