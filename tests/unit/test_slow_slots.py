"""Slots that become slow, recover or are drained, in the simulator and in policies."""

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
"""0.01 + 2 s of generation, 0.2 s of scoring, 0.4 s of training."""


def test_a_change_of_speed_scales_the_remaining_work():
    def simulated_times(*slowdowns):
        result = simulate(parse(ONE | {"slowdowns": slowdowns}), "serial").result
        assert result.oracle_s <= result.step_s * (1 + 1e-9)
        return result.generation_s, result.step_s

    assert simulated_times() == pytest.approx((2.01, 2.61))
    assert simulated_times({"slot": 0, "rate": 3, "from_s": 1.01}) == pytest.approx((1.01 + 3, 1.01 + 3 + 1.8))
    assert simulated_times({"slot": 0, "rate": 3, "from_s": 1.01, "until_s": 2.51}) == pytest.approx((3.01, 3.61))
    both = {"slot": 0, "rate": 3, "until_s": 1.5}, {"slot": 0, "rate": 2, "from_s": 0.9, "until_s": 1.5}
    assert simulated_times(*both) == pytest.approx((2.01 - 0.4 + 1.5, 2.61 - 0.4 + 1.5))
    assert simulated_times({"slot": 0, "rate": 2, "from_s": 2.41}) == pytest.approx((2.01, 2.61 + 0.2))


def test_the_bound_includes_slowdowns_of_fully_used_slots():
    fields = {"slots": 4, "response_tokens": [2] * 64, "prompt_tokens": 100, "switch_s": 0.5}
    fields |= {"scoring": {"tokens_per_s": 1e6}, "training": {"tokens_per_s": 102}}
    work = 4 * (lower_bound(parse(fields)).seconds - 2 * 0.5)  # two switches
    slow = [{"slot": 0, "rate": 4, "from_s": 4.0, "until_s": 12.0}, {"slot": 1, "rate": 2, "from_s": 4.0}]
    by_then, idle = 4 * 4 + 8 * (0.25 + 0.5 + 1 + 1), 0.5 * (0.25 + 0.5 + 1 + 1)
    bound = lower_bound(parse(fields | {"slowdowns": slow})).seconds
    assert work > by_then and bound == pytest.approx(12 + (work + idle - by_then) / 3.5 + 0.5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drained_slot_only_takes_part_in_collective_work(policy):
    rates = Rates(8)
    rates.drain(3)
    run = simulate(build(1, 8), policy, rates=rates)
    kinds = {span.kind for span in run.spans if span.where in ("rollout/3", "trainer/3")}
    assert kinds == {"switch", "optimizer"}


def test_samples_leave_a_slot_drained_during_a_step():
    class DrainedDuringStep(Rates):
        """Rates that drain slot 3 after half of the observations of a step."""

        count = 0

        def observe(self, *arguments):
            super().observe(*arguments)
            self.count += 1
            if self.count == 40:
                self.drain(3)

    run = simulate(build(1, 8), "adaptive", rates=DrainedDuringStep(8))
    ends = [span.end for span in run.spans if span.where == "rollout/3"]
    assert max(ends) < 0.5 * run.result.generation_s


def test_a_slow_slot_that_would_delay_the_step_is_only_probed():
    # A group on this slot in every step would nearly double the step time.
    fields = {"slots": 4, "response_tokens": [100] * 16, "group": 4, "lockstep": "all", "slot_speed": [1, 1, 1, 0.5]}
    workload, rates = parse(fields | {"engine": {"flat_batch": 8}}), Rates(4)
    rates.current[3] = 2.0
    serial = simulate(workload, "serial", rates=rates).result.step_s
    steps = [simulate(workload, "adaptive", rates=rates).result.step_s for _ in range(2 * PROBE_AFTER_STEPS)]
    assert [step > 1.01 * serial for step in steps].count(True) == 2 and rates.current == pytest.approx(
        [1, 1, 1, 2], rel=0.01
    )


def test_drained_slots_are_used_after_the_last_working_slot_is_lost():
    rates = Rates(2)
    rates.drain(1)
    workload = build(1, 2, failures=[{"slot": 0, "at_s": 1.0}])
    assert simulate(workload, "adaptive", rates=rates).result.samples_finished == workload.samples


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1, 3])
def test_temporarily_slow_slots_cost_at_most_ten_percent_over_the_bound(slow):
    row = measure(seed=slow, slow=slow, steps=2, policy="adaptive", slots=24)
    assert over_bound(row, "rates") <= 1.1
    assert over_bound(row, "rates") <= over_bound(row, "fixed") + 0.01
