"""Complete steps in virtual time: the real controller and policies on simulated engines, for random workloads."""

import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlfuse.fusion import assignment
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.devices import SimulatedTrainer
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import WorkloadError, parse

few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def slowdowns(slots):
    """Return slowdowns or speedups of one slot, for a part of the step or until its end."""
    until = st.one_of(st.none(), st.floats(2.0, 8.0))
    times = {"from_s": st.floats(0.0, 1.9), "until_s": until, "rate": st.sampled_from([0.5, 1.5, 5.0])}
    return st.fixed_dictionaries({"slot": st.integers(0, slots - 1), **times})


@st.composite
def workloads(draw, failures=True):
    """Return small random workloads: tight caches and batches, slow slots, lost engines, several passes and models."""
    slots, group = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 4]))
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=12).map(lambda each: each * group))
    lost = draw(st.sets(st.integers(0, slots - 1), max_size=slots)) if failures else set()
    gae = draw(st.booleans())
    return parse(
        {
            "slots": slots,
            "response_tokens": lengths,
            "group": group,
            "prompt_tokens": draw(st.integers(1, 60)),
            "engine": {
                "step_base_s": 0.02,
                "step_per_sequence_s": draw(st.sampled_from([0.0, 1e-4, 2e-3])),
                "step_per_context_token_s": draw(st.sampled_from([0.0, 1e-6])),
                "flat_batch": draw(st.integers(1, 8)),
                "max_sequences": draw(st.integers(1, 16)),
                "kv_tokens": draw(st.sampled_from([181, 400, 100_000])),
                "prefill_tokens_per_s": 10_000,
            },
            "scoring": {"tokens_per_s": 5000, "kinds": ["old_log_prob", "values"] if gae else ["old_log_prob"]},
            "training": {
                "tokens_per_s": draw(st.sampled_from([500, 5000])),
                "mini_batches": draw(st.integers(1, 4)),
                "models": ["critic", "actor"] if gae else ["actor"],
                "epochs": draw(st.integers(1, 2)),
                "early": draw(st.booleans()),
                "call_s": draw(st.sampled_from([0.0, 0.05])),
                "optimizer_s": draw(st.sampled_from([0.0, 0.1])),
            },
            "switch_s": draw(st.sampled_from([0.0, 0.3])),
            "kv_bytes_per_token": 1000,
            "link_bytes_per_s": draw(st.sampled_from([0.0, 1e8])),
            "slot_speed": draw(st.sampled_from([[], [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(slots)]])),
            "decode_speed": draw(st.sampled_from([[], [draw(st.sampled_from([0.25, 3.0])) for _ in range(slots)]])),
            "slowdowns": draw(st.lists(slowdowns(slots), max_size=3)),
            "failures": [{"slot": slot, "at_s": draw(st.floats(0.0, 3.0))} for slot in sorted(lost)],
            "length_history_sigma": draw(st.sampled_from([None, 0.3])),
        }
    )


@pytest.mark.slow
@few
@given(
    workloads(), st.sampled_from(sorted(POLICIES)), st.sampled_from([1, 3, 1 << 30]), st.sampled_from([0.0, 0.2, 0.5])
)
def test_each_sample_runs_once_within_capacity_and_steps_respect_the_bound(workload, policy, credit, threshold):
    # Engines reject impossible requests, runs are audited, and deadlocks are errors, so a completed run is valid.
    result = simulate(workload, policy, Settings(threshold=threshold, credit_samples=credit)).result
    assert result.samples_finished == workload.samples
    assert result.oracle_s <= result.step_s * (1 + 1e-9)
    assert result.generation_s <= result.generation_and_scoring_s <= result.step_s
    assert 0 < result.busy_share <= 1 + 1e-9


LONG_TAIL = {
    "slots": 4,
    "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 400, "count": 128},
    "prompt_tokens": 50,
    "engine": {"flat_batch": 16, "max_sequences": 64},
    "scoring": {"tokens_per_s": 3000},
    "training": {"tokens_per_s": 2000, "mini_batches": 4},
    "switch_s": 0.2,
    "kv_bytes_per_token": 1000,
    "link_bytes_per_s": 1e9,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_simulations_are_deterministic(policy):
    workload = parse(LONG_TAIL)
    first, second = (simulate(workload, policy) for _ in range(2))
    assert first.result.as_json() | {"cpu_s": 0} == second.result.as_json() | {"cpu_s": 0}


def test_serial_takes_the_sum_of_its_stages():
    workload = parse(LONG_TAIL | {"slots": 1, "response_tokens": [100], "training": {"tokens_per_s": 2000}})
    result = simulate(workload, "serial").result
    generation = 50 / 20_000 + 100 * 0.02 + 2e-8 * sum(50 + step for step in range(100))
    assert result.generation_s == pytest.approx(generation)
    assert result.generation_and_scoring_s == pytest.approx(generation + 0.2 + 150 / 3000)
    assert result.step_s == pytest.approx(generation + 0.2 + 150 / 3000 + 150 / 2000 + 0.2)
    assert result.oracle_s == pytest.approx(result.step_s)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("policy", ["serial", "adaptive"])
def test_passes_over_the_same_samples_are_one_call(policy, slots, monkeypatch):
    # Each pass has separate, consecutive spans, and takes as long as in a separate call.
    calls = []
    for method in ("score", "accumulate"):
        real = getattr(SimulatedTrainer, method)

        def record_call(trainer, passes, rows, slot=None, real=real):
            calls.append(passes)
            return real(trainer, passes, rows, slot)

        monkeypatch.setattr(SimulatedTrainer, method, record_call)
    passes = {"scoring": {"tokens_per_s": 3000, "kinds": ["old_log_prob", "ref", "values"], "call_s": 0.02}}
    passes |= {"training": {"tokens_per_s": 2000, "models": ["critic", "actor"], "mini_batches": 2, "call_s": 0.02}}
    workload = parse(LONG_TAIL | {"slots": slots} | passes)
    joined, together = simulate(workload, policy), list(calls)
    calls.clear()
    monkeypatch.setattr(assignment, "models_in_same_call", lambda view, waiting, first: ())
    alone = simulate(workload, policy)
    assert joined.result.step_s == pytest.approx(alone.result.step_s, rel=1e-3)
    assert {len(each) for each in calls} == {1} and len(together) < len(calls)
    assert ("critic", "actor") in together
    if policy == "serial" or slots == 1:  # otherwise each pass runs on the slot that is free first
        assert ("actor", "ref", "critic") in together
    kinds = ("old_log_prob", "ref", "values", "update_critic", "update_actor")
    driver = [each for each in joined.spans if each.where == "driver" and each.kind in kinds]
    ranks = [each for each in joined.spans if each.kind in (*kinds, "backward") and each.where.startswith("trainer/")]
    for slot in range(slots):
        mine = sorted((each.start, each.end, each.kind) for each in driver if each.attributes.get("slot") == slot)
        assert mine and all(before[1] <= after[0] + 1e-9 for before, after in pairwise(mine))
        work = [each for each in ranks if each.where == f"trainer/{slot}"]
        for each in work:
            kind = f"update_{each.attributes['model']}" if each.kind == "backward" else each.kind
            assert any(start - 1e-9 <= each.start and each.end <= end + 1e-9 for start, end, of in mine if of == kind)


@pytest.mark.slow
def test_lost_engines_and_slow_slots_lose_no_sample():
    plain = simulate(parse(LONG_TAIL), "stream").result
    lost = simulate(parse(LONG_TAIL | {"failures": [{"slot": 1, "at_s": 2.0}]}), "stream").result
    every = {"failures": [{"slot": slot, "at_s": 2.0} for slot in range(4)], "restart_s": 5.0}
    alone = simulate(parse(LONG_TAIL | every), "stream").result
    slow = simulate(parse(LONG_TAIL | {"slot_speed": [1, 1, 1, 0.5]}), "stream").result
    assert alone.samples_finished == 128 and alone.generation_s > lost.generation_s + 5.0
    assert lost.samples_finished == slow.samples_finished == plain.samples_finished == 128
    assert lost.generation_s > plain.generation_s and slow.step_s > plain.step_s


@pytest.mark.parametrize("extreme", [{"switch_s": 1e8}, {"engine": {"step_base_s": 1e5}}], ids=str)
def test_simulation_time_is_independent_of_step_time(extreme):
    workload = parse({"slots": 2, "response_tokens": [40, 300, 20, 30]} | extreme)
    began = time.process_time()
    found = simulate(workload, "adaptive").result
    assert found.step_s >= found.oracle_s > 1e7
    assert time.process_time() - began < 30


def test_steps_longer_than_the_limit_are_rejected():
    workload = parse({"slots": 2, "response_tokens": [40, 30], "training": {"tokens_per_s": 1e-18}})
    with pytest.raises(WorkloadError, match=r"the step takes at least .* s \(bound by .*; raise rates"):
        simulate(workload, "serial")
