"""The lower bound of the simulation, compared with manually computed cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfuse.simulate.bound import _falling_hull, lower_bound
from rlfuse.simulate.workload import parse

ENGINE = {
    "step_base_s": 0.02,
    "step_per_sequence_s": 1e-4,
    "step_per_context_token_s": 0.0,
    "flat_batch": 4,
    "max_sequences": 16,
    "kv_tokens": 100_000,
    "prefill_tokens_per_s": 10_000,
}


def workload(lengths, slots=1, mini_batches=1, **more):
    return parse(
        {
            "slots": slots,
            "response_tokens": lengths,
            "prompt_tokens": 100,
            "engine": ENGINE,
            "scoring": {"tokens_per_s": 1000},
            "training": {"tokens_per_s": 500, "mini_batches": mini_batches},
            "switch_s": 0.5,
        }
        | more
    )


def test_bound_of_one_sample_on_one_slot():
    bound = lower_bound(workload([50]))
    generation = 100 / 10_000 + 50 * 0.02
    assert bound.generation_s == pytest.approx(generation)
    assert bound.generation_and_scoring_s == pytest.approx(generation + 0.5 + 0.15)
    assert bound.seconds == pytest.approx(generation + 0.5 + 0.15 + 0.3 + 0.5)  # and the switch back to generation


def test_context_counts_every_token_of_every_step():
    engine = ENGINE | {"step_per_context_token_s": 1e-5}
    context = sum(100 + step for step in range(50)) * 1e-5
    assert lower_bound(workload([50], engine=engine)).generation_s == pytest.approx(0.01 + 1.0 + context)


def test_equal_lengths_share_one_batch():
    # 8 samples on 1 slot: 50 steps of a batch of 8, then all scoring and training.
    bound = lower_bound(workload([50] * 8))
    generation = 8 * 0.01 + 50 * (0.02 + 4 * 1e-4)
    assert bound.generation_s == pytest.approx(generation, rel=1e-6)
    assert bound.seconds == pytest.approx(generation + 0.5 + 8 * 0.15 + 8 * 0.3 + 0.5, rel=1e-6)


def test_a_small_cache_limits_concurrent_sequences():
    # 8 samples, each 300 tokens at its end, in a cache of 400 tokens.
    contexts = 8 * sum(100 + step for step in range(200))
    bound = lower_bound(workload([200] * 8, engine=ENGINE | {"kv_tokens": 400}))
    assert bound.generation_s == pytest.approx(8 * 0.01 + contexts / 400 * 0.02)
    assert bound.generation_s > 1.5 * lower_bound(workload([200] * 8)).generation_s


def test_samples_of_a_group_prefill_their_prompt_once():
    separate, together = (lower_bound(workload([50] * 8, group=group)) for group in (1, 8))
    assert separate.seconds - together.seconds == pytest.approx(7 * 0.01, rel=1e-3)


def test_later_mini_batches_follow_the_longest_sample():
    # 400 steps hide all other work except scoring and training of this sample, and the second mini-batch.
    lengths = [400, 10, 10, 10]
    bound = lower_bound(workload(lengths, slots=2, mini_batches=2))
    second = max(2 * 110 / 500 / 2, 110 / 500)
    assert bound.bound_by == "longest sample"
    assert bound.seconds == pytest.approx(0.01 + 8.0 + 0.5 + 1.0 + second + 0.5)


def test_old_log_probs_precede_the_first_update_and_reference_log_probs_need_not():
    # The last sample is the longest; during its pass, its slot has time to switch to training.
    def seconds(kind):
        return lower_bound(workload([10, 10, 10, 400], 2, 4, scoring={"tokens_per_s": 200, "kinds": [kind]})).seconds

    assert seconds("old_log_prob") == pytest.approx(8.01 + 2.5 + 2 * 0.22 + 1.0 + 0.5)
    assert seconds("ref") == pytest.approx(8.01 + 2.5 + 1.0 + 0.5)


def test_work_after_samples_that_end_together_is_shared():
    # Eight samples of 400 steps on four slots: 8 * (0.5 + 1) s of scoring and training can't begin before 8.01 s.
    assert lower_bound(workload([400] * 8, slots=4)).seconds == pytest.approx(0.01 + 8.0 + 8 * 1.5 / 4 + 0.5)
    # With one long sample and seven short ones, only the work of the long one remains.
    assert lower_bound(workload([400, *[10] * 7], slots=4)).seconds == pytest.approx(0.01 + 8.0 + 1.5 + 0.5)


def test_lockstep_work_follows_generation_on_all_slots():
    # Both slots run every pass, and the longest sample is not split; nothing overlaps the 400 steps.
    generation, passes, training = 0.01 + 8.0, (500 + 3 * 110) / 2 / 1000, 500 / 500
    assert lower_bound(workload([400, 10, 10, 10], 2, lockstep="all")).seconds == pytest.approx(
        generation + 0.5 + passes + training + 0.5
    )
    stages = {"lockstep": "all", "training": {"tokens_per_s": 500, "bubbles": 0.6}}
    for deferred, overlapping in ((False, passes + 0.6 * training), (True, max(passes, 0.6 * training))):
        scoring = {"tokens_per_s": 1000, "deferred": deferred}
        bound = lower_bound(workload([400, 10, 10, 10], 2, **stages, scoring=scoring))
        assert bound.seconds == pytest.approx(generation + 0.5 + training + overlapping + 0.5)


def test_lockstep_work_runs_at_the_speed_of_the_slowest_slot():
    # One sample of 400 steps; its pass and training run unsplit on both slots, at the speed of the slower one.
    slow = [{"slot": 1, "rate": 5, "from_s": 1}]
    costs = {"scoring": {"tokens_per_s": 1000, "call_s": 0.3}, "training": {"tokens_per_s": 500, "call_s": 0.4}}
    free, stages = (
        lower_bound(workload([400, 10], 2, lockstep="all", slowdowns=slow, **costs | {"training": training}))
        for training in (costs["training"], costs["training"] | {"bubbles": 0.0})
    )
    generation, calls, work = 0.01 + 8.0, 0.3 + 0.4, (400 + 10 + 200) / 2 / 1000 + 500 / 500
    in_first_second = 0.8  # work that the bound allows before the end of generation
    assert stages.seconds == pytest.approx(generation + 0.5 + calls + (work - in_first_second) / 0.2 + 0.5)
    assert free.seconds == pytest.approx(generation + 0.5 + calls + work + 0.5), (
        "the other slot can do nearly all of it"
    )
    # A separate critic has separate calls; in a fused schedule both models share them.
    both = {"tokens_per_s": 500, "call_s": 0.4, "models": ["critic", "actor"]}
    separate, stages = (
        lower_bound(workload([400, 10], 2, lockstep="all", training=both | more)) for more in ({}, {"bubbles": 0.0})
    )
    assert separate.seconds - stages.seconds == pytest.approx(0.4)


def test_the_bound_reports_the_binding_work():
    many = [100] * 64
    assert lower_bound(workload(many, scoring={"tokens_per_s": 1e6}, training={"tokens_per_s": 1e6})).bound_by == (
        "generation work"
    )
    assert (
        lower_bound(workload(many, scoring={"tokens_per_s": 100}, training={"tokens_per_s": 1e6})).bound_by == "scoring"
    )
    assert lower_bound(workload(many, training={"tokens_per_s": 50})).bound_by == "training"
    assert (
        lower_bound(workload([500, *[20] * 8], slots=8, training={"tokens_per_s": 5000})).bound_by == "longest sample"
    )


def test_slow_slots_raise_the_bound():
    lengths = [400, *[20] * 20]
    plain = lower_bound(workload(lengths, slots=2)).seconds
    assert lower_bound(workload(lengths, slots=2, slot_speed=[0.5, 0.5])).seconds > 1.8 * plain


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=30))
def test_the_hull_is_below_all_points_convex_and_falling(points):
    x, y = np.array(points).T
    corners, heights = _falling_hull(x, y)
    assert (np.interp(x, corners, heights) <= y + 1e-9).all()
    assert (np.diff(heights) <= 0).all()
    slopes = np.diff(heights) / np.diff(corners)
    assert (np.diff(slopes) >= -1e-6 * np.abs(slopes[1:])).all()
