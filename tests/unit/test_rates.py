"""Rates of slots (noise, slow and recovered slots, typical speed), and division of work by rates."""

from itertools import product
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.fusion.assignment import divide_work
from rlfuse.fusion.decisions import Slot
from rlfuse.simulate.speed import Speed, combined_speed


def observed(slots, seconds, times=3, costs=1.0):
    """Return rates after each slot took `seconds` for work of 1 predicted second, `times` times."""
    rates = Rates(slots)
    for _ in range(times):
        for slot, took in enumerate(seconds):
            rates.observe(slot, "decode", took * costs, 1.0)
    return rates


def test_noise_does_not_change_rates():
    rng, rates = np.random.default_rng(1), Rates(16)
    for _ in range(500):
        for slot in range(16):
            rates.observe(slot, "decode", 0.5 * float(rng.lognormal(0.0, 0.08)), 0.5)
    assert rates.current == [1.0] * 16


def test_a_slot_is_slow_after_two_slow_measurements_but_not_after_one():
    rates = observed(4, [1, 1, 1, 1])
    rates.observe(2, "decode", 1.8, 1.0)
    assert rates.current == [1.0] * 4
    rates.observe(2, "decode", 1.6, 1.0)
    assert rates.current == [1.0, 1.0, pytest.approx(1.6), 1.0]


def test_short_work_is_accumulated_within_a_step():
    # The driver learns late that one call ended, so that the next one seems short; the last of a step is discarded.
    rates = observed(2, [1, 1])
    for _ in range(20):
        rates.begin(Costs())
        for took in (0.29, 0.02, 0.27, 0.02, 0.15):
            rates.observe(0, "decode", took, 0.15)
            rates.observe(1, "decode", 0.15, 0.15)
        assert rates.current == [1.0, 1.0]
    for _ in range(9):
        rates.observe(0, "decode", 0.14, 0.07)
        rates.observe(1, "decode", 0.07, 0.07)
    assert rates.current == [pytest.approx(2.0), 1.0]


def test_one_long_measurement_is_enough():
    rates = observed(4, [1, 1, 1, 1])
    rates.observe(2, "decode", 6.0, 2.0)
    assert rates.current[2] == pytest.approx(3.0)


def test_a_rate_stays_within_its_dead_band_and_falls_back_to_one_below_the_threshold():
    rates = observed(4, [1, 1, 1, 2.0])
    for took, rate in ((2.4, 2.0), (1.7, 2.0), (2.8, 2.8), (1.3, 1.3), (1.15, 1.3), (1.0, 1.3), (0.95, 1.0)):
        for _ in range(3):
            rates.observe(3, "decode", took, 1.0)
        assert rates.current[3] == pytest.approx(rate), took


@pytest.mark.parametrize("wrong", [0.2, 1.0, 7.0])
def test_the_rate_of_typical_slots_is_one_for_any_error_of_the_cost_model(wrong):
    rates = observed(8, [1, 1, 1, 1, 1, 1, 1, 3], times=6, costs=wrong)
    assert rates.current == [1.0] * 7 + [pytest.approx(3.0)]


def test_rates_of_known_speeds_equal_measured_rates():
    measured = observed(4, [0.5, 1.0, 0.5, 1 / 1.9])
    assert Rates.of((2.0, 1.0, 2.0, 1.9)).current == measured.current == [1.0, 2.0, 1.0, 1.0]


def test_each_kind_of_work_has_its_own_typical_time():
    rates = observed(4, [1, 1, 1, 1])
    for _, slot in product(range(5), range(4)):
        rates.observe(slot, "ref", 1.9, 1.0)
        rates.observe(slot, "actor", 0.4, 1.0)
    assert rates.current == [1.0] * 4


def test_rates_are_one_until_half_of_the_slots_were_measured():
    rates = Rates(8)
    for _ in range(4):
        rates.observe(0, "decode", 5.0, 1.0)
    assert rates.current == [1.0] * 8


def test_a_slot_drained_until_recovery_is_restored_by_two_fast_probes():
    rates = observed(4, [1, 1, 1, 4], times=4)
    rates.drain(3, until_recovered=True)
    rates.begin(Costs())
    assert rates.drained == {3} and not rates.steps_since_measured
    rates.record_probe(3, 3.9)
    rates.record_probe(3, 1.0)
    assert rates.drained == {3}, "one fast probe is not enough"
    rates.record_probe(3, 1.1)
    assert rates.drained == set() and rates.current == [1.0] * 4


def test_a_typical_slot_is_drained_until_it_is_restored():
    rates = observed(4, [1, 1, 1, 1])
    rates.drain(1)
    rates.begin(Costs())
    assert not rates.steps_since_measured
    for _ in range(5):
        rates.record_probe(1, 1.0)
    assert rates.drained == {1}
    rates.restore(1)
    assert rates.drained == set()


# Division of work by rates --------------------------------------------------------------------------------------------


def view_of(rates, *ends):
    """Return idle trainers of these rates and busy ones that are free at `ends` (seconds); generation is complete."""
    slots = [Slot(i, "trainer", rate=rate) for i, rate in enumerate(rates)]
    effective_slots = sum(1 / rate for rate in rates)
    slots += [Slot(len(rates) + i, "trainer", busy=True) for i in range(len(ends))]
    return SimpleNamespace(
        slots=slots,
        effective_slots=effective_slots + len(ends),
        prompts_dominate=False,
        now=0.0,
        ends=lambda: list(ends),
        unfinished=0,
        costs=Costs(),
    )


def ends(shares, sizes, rates):
    return max(sum(sizes[name] for name in names) * rates[slot] for slot, names in shares.items())


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=3), st.integers(1, 9))
def test_division_of_equal_pieces_is_optimal(rates, count):
    sizes = {str(i): 1 for i in range(count)}
    slots = list(range(len(rates)))
    shares = divide_work(view_of(rates), sizes, count, slots, call_s=count, tokens_per_s=1)
    assert sorted(name for names in shares.values() for name in names) == sorted(sizes)
    least = min(
        max(n * rate for n, rate in zip(counts, rates, strict=True))
        for counts in product(range(count + 1), repeat=len(rates))
        if sum(counts) == count
    )
    assert ends(shares, sizes, rates) == pytest.approx(least)


def test_a_slow_slot_leaves_work_that_a_busy_slot_would_finish_earlier():
    sizes = {"a": 10, "b": 10}
    assert divide_work(view_of([5.0]), sizes, 20, [0], call_s=20, tokens_per_s=1) == {0: ("b", "a")}
    assert divide_work(view_of([5.0], 1.0), sizes, 20, [0], call_s=20, tokens_per_s=1) == {}
    assert divide_work(view_of([5.0], 60.0), sizes, 20, [0], call_s=20, tokens_per_s=1) == {0: ("b",)}


@pytest.mark.parametrize(("end", "taken"), [(0.0, 4), (4.0, 6), (8.0, 8), (20.0, 8)])
def test_the_first_free_slot_takes_the_share_that_lets_all_end_together(end, taken):
    view, sizes = view_of([1.0], end), {str(i): 1 for i in range(8)}
    assert len(divide_work(view, sizes, 8, [0], call_s=2, tokens_per_s=1)[0]) == taken


def test_drained_slots_get_no_share_of_the_remaining_work():
    # Shares reserved for drained slots would return to the others in ever smaller calls.
    view, sizes = view_of([1.0, 1.0]), {str(i): 1 for i in range(8)}
    view.slots.append(Slot(2, "trainer", drained=True))
    assert [len(names) for names in divide_work(view, sizes, 8, [0, 1], call_s=1, tokens_per_s=1).values()] == [4, 4]


def test_during_generation_a_slot_takes_its_share_of_the_ready_work():
    view, sizes = view_of([1.0], inf), {str(i): 1 for i in range(8)}
    view.unfinished = 1
    assert len(divide_work(view, sizes, 8, [0], call_s=2, tokens_per_s=1)[0]) == 4


# Speeds of simulated slots -------------------------------------------------------------------------------------------

changes = st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.2, 3.0)), min_size=1, max_size=5)


def speed(steps):
    times = np.cumsum([0.0, *(length for length, _ in steps[:-1])])
    return Speed([(float(time), value) for time, (_, value) in zip(times, steps, strict=True)])


@given(changes, st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_the_work_done_until_the_predicted_end_is_the_cost(steps, start, cost):
    each = speed(steps)
    assert each.done(start, each.end(start, cost)) == pytest.approx(cost, abs=1e-9)
    assert each.later(3.0).end(start + 3.0, cost) == pytest.approx(each.end(start, cost) + 3.0)


@pytest.mark.slow
@given(changes, changes, st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_combined_speed_is_the_sum_of_the_speeds(first, second, start, more):
    both, end = [speed(first), speed(second)], start + more
    assert combined_speed(both).done(start, end) == pytest.approx(sum(each.done(start, end) for each in both), abs=1e-9)
    assert sum(each.least for each in both) <= combined_speed(both).least * (1 + 1e-9)
