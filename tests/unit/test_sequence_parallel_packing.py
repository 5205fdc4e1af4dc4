"""Packing of rows for sequence parallelism: degrees, costs, lower bounds, and lockstep plans."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rlfuse.engines.trainer.cost_measurement import fit_costs
from rlfuse.engines.trainer.lockstep_packing import plan_lockstep
from rlfuse.engines.trainer.makespan import bounds, makespan
from rlfuse.engines.trainer.micro_batches import balance, pack
from rlfuse.engines.trainer.sequence_parallel_packing import (
    Costs,
    Overhead,
    Share,
    Unit,
    degrees_up_to,
    plan,
    unit_per_row,
    units_by_prompt,
)
from rlfuse.samples import Row

TWO_CORES = (1.0, 1.0, 1.5, 2.0)
"""Slowdown of four ranks on two cores."""


def costs(start=0.0, token=0.0, pair=0.0, slower=(1.0,)):
    """Return costs with the same overhead for two and four ranks."""
    return Costs(pair, dict.fromkeys((2, 4), Overhead(start, token)), slower)


def slower(rng):
    """Draw the slowdown of four ranks on one, two or four cores that also share other resources."""
    cores, shared = rng.choice([1, 2, 4]), rng.random() / 5
    return tuple(max(1.0, count / cores) * (1 + shared * (count - 1)) for count in range(1, 5))


def row(prompt, response, group=0):
    return Row(np.full(prompt, group, dtype=np.int32), np.zeros(response, dtype=np.int32))


def random_rows(rng):
    return [row(rng.choice([3, 40, 300]), rng.randint(1, 200), rng.randint(0, 6)) for _ in range(rng.randint(1, 40))]


@pytest.mark.slow
def test_every_row_runs_once_on_aligned_ranks_in_one_order():
    for seed in range(60):
        rng = random.Random(seed)
        rows, ranks, budget = random_rows(rng), rng.choice([4, 8]), rng.randint(50, 600)
        most, lockstep = rng.choice([None, 1, 3]), rng.random() < 0.5
        degrees = degrees_up_to(rng.choice([1, 2, 4]))
        units = rng.choice([unit_per_row, lambda rows: units_by_prompt(rows, budget * degrees[-1], ranks, most)])(rows)  # noqa: B023
        machine = costs(20, rng.random(), rng.random() / 100)
        if lockstep:
            found = plan_lockstep(units, ranks, budget, degrees, machine, most)
        else:
            found = plan(units, ranks, budget, degrees, machine, most)
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


def test_without_sequence_parallelism_the_plan_has_balanced_micro_batches():
    for seed in range(30):
        rng = random.Random(seed)
        rows, ranks, budget = random_rows(rng), rng.randint(1, 5), rng.randint(50, 600)
        found = plan(unit_per_row(rows), ranks, budget)
        tokens = [each.tokens for each in rows]
        expected = [
            [[mine[i] for i in bin] for bin in pack([tokens[i] for i in mine], budget)]
            for mine in balance(tokens, ranks)
        ]
        assert [[list(each.rows) for each in shares] for shares in found] == expected


@pytest.mark.parametrize(
    "tokens, ranks, budget, costs, degrees",
    [
        ([100], 4, 1000, Costs(), {4}),  # the other ranks would be idle
        ([100], 4, 1000, costs(80.0), {1}),  # the exchange costs more than it saves
        ([100, 100], 4, 1000, costs(20.0), {2}),  # 100 on one rank each, 70 on two, 90 on all in sequence
        ([100], 4, 30, costs(1e9), {4}),  # nothing else fits
        ([100] * 8, 4, 1000, Costs(), {1}),  # all ranks have work with degree 1
        ([900, 100, 100, 100], 4, 1000, costs(30.0), {4}),  # all in one micro-batch, so one start
        ([900, 100, 100, 100], 4, 240, costs(30.0), {4, 1}),  # a second one starts too late
        ([9] * 40, 4, 100, costs(token=0.2), {1}),
        ([100], 4, 1000, costs(1.0, slower=TWO_CORES), {2}),  # four ranks would do the same work on the same two cores
        ([100, 100], 4, 1000, costs(1.0, slower=TWO_CORES), {1}),  # both cores are busy
        ([100] * 3, 4, 1000, costs(1.0, slower=TWO_CORES), {1}),  # the third shares cores with the other two
        ([100, 100, 100], 2, 1000, costs(1.0), {1, 2}),  # two in parallel, then the third on both ranks
        ([100, 100, 100], 2, 1000, costs(1.0, slower=(1.0, 2.0)), {1}),  # one core
        ([100], 2, 1000, costs(30.0, slower=(1.0, 1.3)), {1}),
        ([100], 2, 1000, costs(30.0, slower=(1.0, 1.1)), {2}),
        ([100, 100], 4, 30, costs(1.0, slower=TWO_CORES), {4}),  # nothing else fits
    ],
)
def test_the_degree_fits_and_minimises_the_time(tokens, ranks, budget, costs, degrees):
    rows, degrees_allowed = [row(1, size - 1) for size in tokens], degrees_up_to(min(ranks, 4))
    found = plan(unit_per_row(rows), ranks, budget, degrees_allowed, costs)
    assert {share.degree for shares in found for share in shares} == degrees


def test_ranks_that_finish_free_their_shared_cores():
    two = costs(slower=TWO_CORES)
    assert two.end([]) == two.end([0.0, 0.0]) == 0.0
    assert two.end([8, 0, 0, 0]) == two.end([8, 8]) == 8.0
    assert two.end([8, 8, 8, 8]) == 16.0
    assert two.end([2, 8, 4, 4]) == 2 * 2 + 1.5 * 2 + 4  # four ranks, then three, then one
    assert costs(slower=(1.0, 1.5)).end([4, 4, 4]) == 6.0  # as the last measurement
    assert Costs().end([3, 5]) == 5.0


@pytest.mark.slow
def test_no_plan_ends_later_than_one_degree_for_all():
    """Compare predicted times over random batches and machines."""
    for seed in range(200):
        rng = random.Random(seed)
        machine = costs(rng.choice([0, 5, 50]), rng.choice([0, 0.05, 0.5]), rng.choice([0, 0.01]), slower=slower(rng))
        units = unit_per_row([row(1, rng.choice([20, 100, 1000]) - 1) for _ in range(rng.randint(1, 6))])
        ends, budget = [], rng.choice([1000, 3000])
        for degrees in ((1, 2, 4), (1,), (2,), (4,)):
            loads = [0.0] * 4
            for rank, shares in enumerate(plan(units, 4, budget, degrees, machine)):
                loads[rank] = sum(
                    machine.start(share.degree) + sum(machine.seconds(units[i], share.degree) for i in share.rows)
                    for share in shares
                )
            ends.append(machine.end(loads))
        assert ends[0] <= 1.05 * min(ends[1:]), (seed, ends)


def clips_and_texts(seed, batches=1):
    """Return units of hour-long clips and of short texts."""
    rng = random.Random(seed)
    clips = [rng.randint(40_000, 90_000) for _ in range(rng.randint(6, 11) * batches)]
    lengths = clips + [rng.randint(100, 600) for _ in range(400 * batches)]
    return [Unit((i,), length, length**2 / 2) for i, length in enumerate(lengths)]


def over_bound(units, ranks, budget, machine, lockstep=False, degrees=(1, 2, 4, 8)):
    shares = (plan_lockstep if lockstep else plan)(units, ranks, budget, degrees, machine)
    return makespan(shares, units, machine, lockstep) / max(bounds(units, ranks, budget, degrees, machine, lockstep))


SEVEN_B = 3.7e-5
"""Cost of a pair of tokens in attention of a 7B model."""


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16_384, 100_000])
def test_clips_among_texts_keep_32_ranks_equally_busy(budget):
    # For memory alone, a clip would need 4 or 8 ranks, or one.
    ratios = [over_bound(clips_and_texts(seed), 32, budget, Costs(SEVEN_B)) for seed in range(20)]
    assert min(ratios) > 1 - 1e-9 and max(ratios) < 1.07 and np.mean(ratios) < 1.01
    exchanges = Costs(SEVEN_B, {1: Overhead(20), **{d: Overhead(20 + 5 * d, 0.01) for d in (2, 4, 8)}})
    ratios = [over_bound(clips_and_texts(seed), 32, 16_384, exchanges) for seed in range(20)]
    assert min(ratios) > 1 - 1e-9 and np.mean(ratios) < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16_384, 100_000])
def test_lockstep_ranks_have_micro_batches_of_similar_length(budget):
    # A plan that ignores lockstep takes 1.10x to 1.38x the bound, 1.24x on average.
    ratios = [over_bound(clips_and_texts(seed), 32, budget, Costs(SEVEN_B), True) for seed in range(10)]
    assert min(ratios) > 1 - 1e-9 and max(ratios) < 1.1 and np.mean(ratios) < 1.02


def test_short_units_fill_the_rest_of_a_column_with_the_degree_of_its_long_unit():
    units = unit_per_row([row(1, tokens - 1) for tokens in (80, 60, 6, 4)])
    shares = plan_lockstep(units, 4, 40, (1, 2), Costs())
    assert [[(share.rows, share.degree) for share in mine] for mine in shares] == [[((0,), 2)]] * 2 + [
        [((1, 2, 3), 2)]
    ] * 2


def test_a_column_holds_units_of_different_degrees():
    units = unit_per_row([row(1, tokens - 1) for tokens in (80, 40, 38, 2)])
    shares = plan_lockstep(units, 4, 40, (1, 2), Costs())
    assert [[share.rows for share in mine] for mine in shares] == [[(0,)], [(0,)], [(1,)], [(2, 3)]]
    shares = plan_lockstep(units, 4, 40, (1, 2), Costs(), most=1)
    assert all(len(share.rows) <= 1 for mine in shares for share in mine)
    with pytest.raises(ValueError, match=r"degrees=\(1, 2\) in lockstep: plan_lockstep"):
        plan(units, 4, 40, (1, 2), lockstep=True)


@pytest.mark.slow
def test_clips_among_texts_keep_512_ranks_equally_busy():
    """Check the same number of units per rank, and so few that the longest clip determines the bound."""
    assert 1 <= over_bound(clips_and_texts(0, batches=16), 512, 16_384, Costs(SEVEN_B)) < 1.05
    assert over_bound(clips_and_texts(1), 512, 16_384, Costs(SEVEN_B)) == pytest.approx(1)
    assert 1 <= over_bound(clips_and_texts(0, batches=16), 512, 16_384, Costs(SEVEN_B), lockstep=True) < 1.05


@pytest.mark.slow
def test_no_plan_is_faster_than_the_bound():
    for seed in range(200):
        rng = random.Random(seed)
        machine = replace(
            costs(rng.choice([0, 50]), rng.choice([0, 0.5]), rng.choice([0, 0.01]), slower=slower(rng)),
            rates=tuple(rng.choice([1.0, 1.0, 2.5]) for _ in range(4)),
        )
        units = unit_per_row([row(1, rng.choice([20, 100, 1000]) - 1) for _ in range(rng.randint(1, 9))])
        budget, lockstep = rng.choice([300, 3000]), rng.random() < 0.5
        shares = (plan_lockstep if lockstep else plan)(units, 4, budget, (1, 2, 4), machine)
        bound = max(bounds(units, 4, budget, (1, 2, 4), machine, lockstep))
        assert makespan(shares, units, machine, lockstep) >= bound * (1 - 1e-9), seed


def test_long_units_in_separate_micro_batches_bound_a_plan():
    # Five units on two groups of two ranks; the last one fills less than half of a micro-batch.
    units = [Unit((i,), tokens, 0.0) for i, tokens in enumerate((10, 9, 8, 7, 6, 5))]
    assert bounds(units[:3], 4, 5, (1, 2), Costs()) == (27 / 4, (9 + 8) / 2)
    assert bounds(units, 4, 5, (1, 2), Costs()) == (45 / 4, (8 + 7 + 6) / 2)
    assert bounds(units, 4, 5, (1, 2), Costs(), lockstep=True) == (45 / 4, (10 + 8 + 6) / 2)
    assert bounds(units, 4, 5, (1, 2), Costs(slower=(1.0, 3.0)))[1] == 3 * (8 + 7 + 6) / 2


def test_the_makespan_is_the_maximum_over_ranks_and_in_lockstep_per_micro_batch():
    units, machine = [Unit((0, 1), 80, 0.0), Unit((2,), 10, 0.0), Unit((3,), 30, 0.0)], costs(start=2.0)
    shares = [[Share((0, 1), 2), Share((2,))], [Share((0, 1), 2), Share((3,))]]
    assert makespan(shares, units, machine, False) == makespan(shares, units, machine, True) == 40 + 2 + 30
    shares = [[Share((0, 1), 2), Share((2,)), Share()], [Share((0, 1), 2), Share(), Share((3,))]]
    assert makespan(shares, units, machine, False) == 72 and makespan(shares, units, machine, True) == 82
    slow = replace(machine, rates=(1.0, 3.0))
    assert makespan(shares, units, slow, False) == 3 * (42 + 30)


def test_backward_passes_add_more_work_than_exchanges():
    machine, units = costs(60.0), unit_per_row([row(1, 99)])
    assert plan(units, 2, 1000, (1, 2), machine)[0][0].degree == 1
    assert plan(units, 2, 1000, (1, 2), machine.trained())[0][0].degree == 2
    machine = Costs(0.1, {1: Overhead(6.0), 2: Overhead(9.0, 0.3)}, TWO_CORES)
    assert machine.trained() == Costs(0.1, {1: Overhead(6.0), 2: Overhead(8.0, pytest.approx(0.2))}, TWO_CORES)


def test_costs_are_fitted_to_timed_passes():
    token, sizes = 1e-4, (32, 1024)
    real = Costs(0.002, {1: Overhead(20.0), 2: Overhead(30.0, 0.1), 4: Overhead(50.0, 0.05)}, (1.0, 1.0, 1.5, 2.0))

    def timing(degree, size):
        return token * (real.start(degree) + real.seconds(Unit((0,), size, size**2 / 2), degree))

    found = fit_costs({d: [timing(d, size) for size in sizes] for d in (1, 2, 4)}, sizes, 0.002 * token, real.slower)
    assert found.pair == pytest.approx(real.pair) and found.slower == real.slower
    for degree, overhead in real.overheads.items():
        assert found.overheads[degree].start == pytest.approx(overhead.start)
        assert found.overheads[degree].token == pytest.approx(overhead.token, abs=1e-9)


def test_noise_in_timed_passes_never_gives_negative_costs():
    found = fit_costs({1: [0.01, 0.1], 2: [0.001, 0.01]}, (32, 1024), 1e-9, (1.0, 1.0))
    assert found.overheads[2] == Overhead(0.0, 0.0)
    decreasing = fit_costs({1: [0.1, 0.01], 2: [0.2, 0.1]}, (32, 1024), 1e-9, (1.0, 1.0))
    assert all(0 <= number < math.inf for number in (decreasing.pair, decreasing.start(1), decreasing.start(2)))
