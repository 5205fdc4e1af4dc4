"""Policies against `serial` and against the bound, in virtual time, on random small machines."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Drawn, Engine, Lognormal, Workload, parse

exploring = settings(deadline=None, derandomize=True, max_examples=16)


@st.composite
def workloads(draw):
    """Up to 80 long-tailed samples on unequal slots, with caches that may be too small and engines that may be lost."""
    slots, group = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    gae, lost = draw(st.booleans()), draw(st.sets(st.integers(0, slots - 1), max_size=slots - 1))
    return parse(
        {
            "slots": slots,
            "seed": draw(st.integers(0, 1000)),
            "response_tokens": {
                "lognormal": {"median": 40, "sigma": draw(st.floats(0.3, 1.3))},
                "cap": 400,
                "count": group * draw(st.integers(1, 80 // group)),
            },
            "group": group,
            "prompt_tokens": draw(st.integers(1, 100)),
            "engine": {
                "step_per_sequence_s": draw(st.sampled_from([1e-4, 1e-3])),
                "step_per_context_token_s": draw(st.sampled_from([0.0, 1e-7])),
                "flat_batch": draw(st.integers(1, 16)),
                "max_sequences": draw(st.integers(4, 64)),
                "kv_tokens": draw(st.sampled_from([600, 2000, 100_000])),
            },
            "scoring": {
                "tokens_per_s": draw(st.sampled_from([500, 5000])),
                "call_s": draw(st.sampled_from([0.0, 0.05])),
                "kinds": ["old_log_prob", "values"] if gae else ["old_log_prob"],
            },
            "training": {
                "tokens_per_s": draw(st.sampled_from([500, 5000])),
                "mini_batches": draw(st.integers(1, 4)),
                "models": ["critic", "actor"] if gae else ["actor"],
                "early": draw(st.booleans()),
                "call_s": draw(st.sampled_from([0.0, 0.05])),
                "optimizer_s": draw(st.sampled_from([0.0, 0.1])),
            },
            "switch_s": draw(st.sampled_from([0.0, 0.1, 0.5])),
            "kv_bytes_per_token": 1000,
            "link_bytes_per_s": draw(st.sampled_from([0.0, 1e8])),
            "slot_speed": [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(slots)],
            "failures": [{"slot": slot, "at_s": draw(st.floats(0.0, 4.0))} for slot in sorted(lost)],
            "length_history_sigma": draw(st.sampled_from([None, 0.3])),
        }
    )


def tolerance(workload):
    """Seconds by which a policy may lose to `serial`: a switch; where engines are lost, a sample from start to end too.

    An engine takes what it holds along: at the same second, one policy may lose a sample that the other had finished.
    """
    if not workload.failures:
        return workload.switch_s
    tokens, scoring, training = workload.longest + workload.prompt_tokens, workload.scoring, workload.training
    again = workload.longest * workload.engine.step_base_s / min(speed.least for speed in workload.speeds())
    later = tokens / scoring.tokens_per_s + scoring.call_s + tokens / training.tokens_per_s + training.call_s
    return workload.switch_s + workload.move_s + again + later


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@exploring
@given(workload=workloads())
def test_a_step_ends_with_every_sample_learned_from_and_takes_no_less_than_the_bound(policy, workload):
    result = simulate(workload, policy).result
    assert result.samples_finished == workload.samples
    assert result.step_s >= result.oracle_s * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stream", "rlhfuse", "adaptive"])
@settings(exploring, max_examples=6, phases=(Phase.explicit, Phase.generate))  # shrinking would tune for minutes
@given(workload=workloads())
def test_a_tuned_policy_never_loses_to_serial_by_more_than_a_switch(policy, workload):
    workload = replace(workload, slot_speed=())  # how unlike slots are, policies learn at different times
    tuned = simulate(workload, policy, tune(workload, policy)).result.step_s
    assert tuned - simulate(workload, "serial").result.step_s <= tolerance(workload)


@pytest.mark.slow
def test_tuning_knows_what_ranks_do_together_only():
    """Tuned as if each rank were free, `adaptive` lost to `serial` here: it consolidated a tail for nothing."""
    together = Settings(lockstep=True, lockstep_backward=True)
    workload = Workload(2, Drawn(Lognormal(200, 0.9), 32, 2000), switch_s=0.1, engine=Engine(max_sequences=64))
    tuned = tune(workload, "adaptive", together)
    assert tuned.lockstep and tuned.lockstep_backward and tune(workload, "serial", together) == together
    as_if_free = replace(tune(workload, "adaptive"), lockstep=True, lockstep_backward=True)
    serial = simulate(workload, "serial", together).result.step_s
    assert simulate(workload, "adaptive", tuned).result.step_s <= serial
    assert simulate(workload, "adaptive", as_if_free).result.step_s > serial
