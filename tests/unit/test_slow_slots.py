"""Slots that become slow, recover or are drained: behaviour of the simulator and of policies."""

import sys
from pathlib import Path

import pytest

from rlfuse.costs.rates import Rates
from rlfuse.fusion.adaptive import PROBE_AFTER_STEPS
from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from slow_slots import build, measure, over_bound

ONE = {
    "slots": 1,
    "response_tokens": [100],
    "prompt_tokens": 100,
    "engine": {"step_base_s": 0.02, "step_per_context_token_s": 0.0, "prefill_tokens_per_s": 10_000},
    "scoring": {"tokens_per_s": 1000},
    "training": {"tokens_per_s": 500},
}
"""Generated after 0.01 + 2 s, scored after 0.2 more, trained on after 0.4 more."""


def test_work_that_a_change_of_speed_meets_takes_what_is_left_of_it_so_many_times_as_long():
    def took(*slowdowns):
        result = simulate(parse(ONE | {"slowdowns": slowdowns}), "serial").result
        assert result.oracle_s <= result.step_s * (1 + 1e-9)
        return result.generation_s, result.step_s

    assert took() == pytest.approx((2.01, 2.61))
    assert took({"slot": 0, "rate": 3, "from_s": 1.01}) == pytest.approx((1.01 + 3, 1.01 + 3 + 1.8))
    assert took({"slot": 0, "rate": 3, "from_s": 1.01, "until_s": 2.51}) == pytest.approx((3.01, 3.61))
    both = {"slot": 0, "rate": 3, "until_s": 1.5}, {"slot": 0, "rate": 2, "from_s": 0.9, "until_s": 1.5}
    assert took(*both) == pytest.approx((2.01 - 0.4 + 1.5, 2.61 - 0.4 + 1.5))
    assert took({"slot": 0, "rate": 2, "from_s": 2.41}) == pytest.approx((2.01, 2.61 + 0.2))


def test_the_bound_of_work_that_fills_every_slot_is_what_they_can_do_until_then():
    fields = {"slots": 4, "response_tokens": [2] * 64, "prompt_tokens": 100, "switch_s": 0.5}
    fields |= {"scoring": {"tokens_per_s": 1e6}, "training": {"tokens_per_s": 102}}
    work = 4 * (lower_bound(parse(fields)).seconds - 2 * 0.5)  # there and back
    slow = [{"slot": 0, "rate": 4, "from_s": 4.0, "until_s": 12.0}, {"slot": 1, "rate": 2, "from_s": 4.0}]
    by_then, idle = 4 * 4 + 8 * (0.25 + 0.5 + 1 + 1), 0.5 * (0.25 + 0.5 + 1 + 1)
    bound = lower_bound(parse(fields | {"slowdowns": slow})).seconds
    assert work > by_then and bound == pytest.approx(12 + (work + idle - by_then) / 3.5 + 0.5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drained_slot_does_nothing_alone(policy):
    rates = Rates(8)
    rates.drain(3)
    run = simulate(build(1, 8), policy, rates=rates)
    alone = {span.kind for span in run.spans if span.where in ("rollout/3", "trainer/3")}
    assert alone == {"switch", "optimizer"}


def test_samples_leave_a_slot_that_is_drained_in_the_middle_of_a_step():
    class Later(Rates):
        """Drained when half a step's observations were made."""

        count = 0

        def observe(self, *arguments):
            super().observe(*arguments)
            self.count += 1
            if self.count == 40:
                self.drain(3)

    run = simulate(build(1, 8), "adaptive", rates=Later(8))
    stayed = [span.end for span in run.spans if span.where == "rollout/3"]
    assert max(stayed) < 0.5 * run.result.generation_s


def test_a_slow_slot_that_would_end_the_step_later_is_tried_now_and_then_only():
    """It was given a group in every step, which then took nearly twice as long."""
    fields = {"slots": 4, "response_tokens": [100] * 16, "group": 4, "lockstep": "all", "slot_speed": [1, 1, 1, 0.5]}
    workload, rates = parse(fields | {"engine": {"flat_batch": 8}}), Rates(4)
    rates.current[3] = 2.0
    serial = simulate(workload, "serial", rates=rates).result.step_s
    steps = [simulate(workload, "adaptive", rates=rates).result.step_s for _ in range(2 * PROBE_AFTER_STEPS)]
    assert [step > 1.01 * serial for step in steps].count(True) == 2 and rates.current == pytest.approx(
        [1, 1, 1, 2], rel=0.01
    )


def test_the_last_slot_that_is_not_drained_being_lost_the_others_go_on():
    rates = Rates(2)
    rates.drain(1)
    workload = build(1, 2, failures=[{"slot": 0, "at_s": 1.0}])
    assert simulate(workload, "adaptive", rates=rates).result.samples_finished == workload.samples


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1, 3])
def test_slots_that_are_slow_for_a_while_cost_at_most_a_tenth_more_than_the_bound(slow):
    row = measure(seed=slow, slow=slow, steps=2, policy="adaptive", slots=24)
    assert over_bound(row, "rates") <= 1.1
    assert over_bound(row, "rates") <= over_bound(row, "fixed") + 0.01
