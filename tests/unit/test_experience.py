"""From scored samples to the optimizer's inputs, against values computed in plain Python."""

import copy
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from rlfuse.algorithms.advantages import ESTIMATORS
from rlfuse.algorithms.experience import Experience
from rlfuse.config.estimators import ESTIMATORS as TRAITS
from rlfuse.config.schema import Config
from rlfuse.samples import Group, Prompt, Response, Reward, RewardFailure, Sample
from rlfuse.step.scoring import PASSES


def groups(rewards, lengths, engine_offset=0.0):
    """Return one group per list of rewards; log-probs of engine, trainer and reference differ by constants."""
    result = []
    for index, (values, counts) in enumerate(zip(rewards, lengths, strict=True)):
        prompt = Prompt(index, np.array([1, 2], np.int32), "p", (), "s", None)
        samples = []
        for k, (value, count) in enumerate(zip(values, counts, strict=True)):
            trainer = -0.1 * np.arange(1, count + 1, dtype=np.float32)
            response = Response(np.arange(count, dtype=np.int32), trainer + engine_offset, "stop", 0, "")
            sample = Sample(prompt, 1, k, 0, response, Reward(value))
            sample.tensors = {"old_log_probs": trainer, "ref_log_probs": trainer - 0.5, "values": np.zeros(count, "f4")}
            samples.append(sample)
        result.append(Group(prompt, samples, baseline(prompt, 0.25 * index)))
    return result


def baseline(prompt, score, tokens=4):
    """Return a scored greedy response; read only by estimators that need it."""
    greedy = Sample(prompt, 1, 9, 0, Response(np.zeros(tokens, np.int32), np.zeros(tokens, "f4"), "stop", 0, ""))
    greedy.reward, greedy.is_baseline = Reward(score), True
    return greedy


def config(**changes):
    result = Config()
    for path, value in changes.items():
        *sections, leaf = path.split("__")
        target = result
        for section in sections:
            target = getattr(target, section)
        setattr(target, leaf, value)
    return result


def correction(**changes):
    return {f"algorithm__rollout_correction__{name}": value for name, value in changes.items()}


def prepare_and_complete(experience, batch):
    """Run all phases from scores to metrics, and return the metrics."""
    experience.prepare(batch)
    return experience.complete(batch) | experience.mismatch(batch)


def test_kl_penalties_apply_to_every_token_and_the_score_to_the_last():
    experience = Experience(config(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.1))
    batch = groups([[1.0], [0.0]], [[3], [2]])
    metrics = prepare_and_complete(experience, batch)
    first = batch[0].samples[0].tensors
    np.testing.assert_allclose(first["token_rewards"], [-0.05, -0.05, 0.95], atol=1e-6)
    np.testing.assert_allclose(first["returns"], [0.85, 0.9, 0.95], atol=1e-6)  # gamma = lambda = 1, values 0
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((1.5 / 3 + 1.0 / 2) / 2)
    raw = [0.85, 0.9, 0.95, -0.1, -0.05]
    mean = sum(raw) / 5
    deviation = math.sqrt(sum((x - mean) ** 2 for x in raw) / 4)
    found = np.concatenate([s.tensors["advantages"] for g in batch for s in g.samples])
    np.testing.assert_allclose(found, [(x - mean) / deviation for x in raw], atol=1e-4)


@pytest.mark.parametrize("source", ["trainer", "engine"])
@pytest.mark.parametrize("rewarded", [True, False])
def test_distillation_rewards_each_token_by_teacher_minus_student_log_prob(source, rewarded):
    changes = {"reward__model_path": "judge"} if rewarded else {}
    experience = Experience(
        config(algorithm__adv_estimator="distill", algorithm__old_log_probs=source, ref__path="teacher", **changes)
    )
    assert experience.kinds == (*["reward"] * rewarded, *["old_log_prob"] * (source == "trainer"), "ref")
    batch = groups([[1.0], [0.0]], [[3], [2]], engine_offset=0.25)
    differences = [[0.7, -0.2, 0.0], [1.1, -3.0]]  # log p_teacher - log p_student of the trainer
    for group, each in zip(batch, differences, strict=True):
        (sample,) = group.samples
        sample.tensors["ref_log_probs"] = sample.tensors["old_log_probs"] + np.array(each, "f4")
        sample.reward = sample.reward if rewarded else None
    offset = 0.25 if source == "engine" else 0.0
    metrics = prepare_and_complete(experience, batch)
    for group, each in zip(batch, differences, strict=True):
        np.testing.assert_allclose(group.samples[0].tensors["advantages"], np.array(each) - offset, atol=1e-6)
    assert metrics["actor/teacher_kl"] == pytest.approx(offset - (0.7 - 0.2 + 1.1 - 3.0) / 5, abs=1e-6)


def test_grpo_compares_within_the_group_and_includes_the_length_penalty():
    experience = Experience(
        config(
            algorithm__adv_estimator="grpo",
            algorithm__norm_adv_by_std_in_grpo=False,
            data__max_response_length=4,
            reward__overlong_buffer__len=2,
        )
    )
    batch = groups([[1.0, 0.0], [0.5, 0.5]], [[2, 4], [1, 3]])
    experience.prepare(batch)
    advantages = [[float(s.tensors["advantages"][0]) for s in g.samples] for g in batch]
    np.testing.assert_allclose(advantages, [[1.0, -1.0], [0.25, -0.25]], atol=1e-6)  # penalties 0, -1, 0, -0.5
    assert batch[0].samples[1].reward.parts["overlong_penalty"] == -1.0
    assert batch[0].samples[1].reward.value == 0.0


def test_mismatch_is_measured_and_corrected_with_a_cap():
    experience = Experience(config(**correction(rollout_is="token", rollout_is_threshold=1.2)))
    batch = groups([[1.0], [0.0]], [[3], [2]], engine_offset=-0.5)
    metrics = prepare_and_complete(experience, batch)
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(0.5)
    np.testing.assert_allclose(batch[0].samples[0].tensors["is_weights"], 1.2, atol=1e-6)  # e^0.5 is above the cap
    assert experience.actor_tensors == ("old_log_probs", "advantages", "is_weights")
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.2)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_is": "token", "rollout_is_threshold_lower": 0.8},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0},
    ],
)
def test_tokens_out_of_bounds_are_masked_and_counted(changes):
    experience = Experience(config(**correction(**changes)))
    batch = groups([[1.0], [0.0]], [[3], [2]])
    batch[0].samples[0].response.log_probs[:] -= 1.0  # a ratio of e in all three tokens
    metrics = prepare_and_complete(experience, batch)
    assert [sample.tensors["is_weights"].tolist() for group in batch for sample in group.samples] == [[0] * 3, [1] * 2]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 5)
    mean = metrics.get("rollout_corr/rollout_is_mean")  # importance weights exist only with rollout_is
    assert mean == (pytest.approx(2 / 5) if "rollout_is" in changes else None)


def test_engine_log_probs_as_old_log_probs_need_no_trainer_pass():
    experience = Experience(config(algorithm__old_log_probs="engine"))
    assert experience.kinds == ("reward", "values")
    batch = groups([[1.0], [0.0]], [[3], [2]], engine_offset=-0.5)
    assert prepare_and_complete(experience, batch) == {}
    for group in batch:
        for sample in group.samples:
            np.testing.assert_array_equal(sample.tensors["old_log_probs"], sample.response.log_probs)


def test_dynamic_sampling_keeps_groups_whose_rewards_differ():
    batch = groups([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.0, 1.0]], [[1, 1]] * 4)
    batch[2].samples[1].reward = batch[3].baseline.reward = RewardFailure("f", "boom")
    assert Experience(config(rollout__n=2)).groups_with_nonzero_std(batch) == [0]  # a group with one reward has no std


def test_adaptive_kl_coefficient_survives_a_checkpoint():
    changes = {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}
    changes |= {"algorithm__kl_ctrl__target_kl": 0.6, "algorithm__kl_ctrl__horizon": 10}
    experience = Experience(config(**changes))
    prepare_and_complete(experience, groups([[1.0], [0.0]], [[3], [2]]))  # 0.5 per token, 1.5 and 1.0 per response
    assert experience.kl.value == pytest.approx(0.001 * (1 + (0.5 / 0.6 - 1) * 2 / 10))
    resumed = Experience(config(**changes))
    resumed.kl.load_state_dict(experience.kl.state_dict())
    assert resumed.kl.value == experience.kl.value


PENALISED = {
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__kl_coef": 0.3,
    "algorithm__gamma": 0.97,
    "algorithm__lam": 0.9,
    "algorithm__rollout_correction__rollout_is": "token",
    "algorithm__rollout_correction__rollout_is_threshold": 1.5,
    "data__max_response_length": 9,
    "reward__overlong_buffer__len": 4,
}


def scored(seed):
    """Return groups of one to four samples of one to nine tokens, with random rewards, log-probs and tensors."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, size=7)
    batch = groups([rng.normal(size=n) for n in sizes], [rng.integers(1, 10, size=n) for n in sizes])
    for sample in (sample for group in batch for sample in group.samples):
        sample.response.log_probs[:] = rng.normal(size=len(sample.response.token_ids))
        for name in sample.tensors:
            sample.tensors[name] = rng.normal(size=len(sample.response.token_ids)).astype("f4")
    return batch


def tensors(batch):
    return [sample.tensors for group in batch for sample in group.samples]


BY_GROUP = [name for name in ESTIMATORS if not TRAITS[name].needs_batch]


@pytest.mark.parametrize("estimator", BY_GROUP)
@pytest.mark.parametrize("seed", range(5))
def test_groups_prepared_individually_in_any_order_are_bitwise_equal_to_a_whole_batch(estimator, seed):
    experience = Experience(config(algorithm__adv_estimator=estimator, **PENALISED))
    whole, one_by_one = scored(seed), scored(seed)
    experience.prepare(whole)
    for number in np.random.default_rng(seed).permutation(len(one_by_one)):
        experience.prepare([one_by_one[number]])
    wanted = {"token_rewards", "advantages", "returns", "is_weights"}
    for expected, found in zip(tensors(whole), tensors(one_by_one), strict=True):
        assert wanted <= found.keys()
        for name in expected:
            assert expected[name].tobytes() == found[name].tobytes(), name
    assert experience.complete(whole) == Experience(experience.config).complete(one_by_one)


@pytest.mark.parametrize("estimator", BY_GROUP)
def test_only_batch_normalised_advantages_wait_for_the_batch(estimator):
    experience = Experience(config(algorithm__adv_estimator=estimator, **PENALISED))
    batch = scored(0)
    experience.prepare(batch)
    before = copy.deepcopy(tensors(batch))
    experience.complete(batch)
    changed = {name for a, b in zip(before, tensors(batch), strict=True) for name in a if (a[name] != b[name]).any()}
    over = TRAITS[estimator].whitens
    assert changed == ({"advantages"} if over else set())
    assert experience.can_train_before_batch_completes("actor") == (
        not over
    ) and experience.can_train_before_batch_completes("critic")
    if over:
        counted = [each["advantages"][:1] if over == "responses" else each["advantages"] for each in tensors(batch)]
        advantages = np.concatenate(counted)
        assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_remax_subtracts_the_score_of_the_greedy_response():
    """Include the KL penalty only in the returns, and the length penalty in returns and baseline."""
    changes = {"algorithm__adv_estimator": "remax", "data__max_response_length": 5, "reward__overlong_buffer__len": 2}
    experience = Experience(config(**changes, algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.1))
    batch = groups([[1.0, 0.0], [0.5]], [[3, 2], [2]])
    experience.prepare(batch)
    # greedy scores -0.5 and -0.25, with the penalty of 4 tokens; a KL of 0.5 per token
    wanted = [[0.85 + 0.5, 0.9 + 0.5, 0.95 + 0.5], [-0.1 + 0.5, -0.05 + 0.5], [0.4 + 0.25, 0.45 + 0.25]]
    for expected, found in zip(wanted, tensors(batch), strict=True):
        np.testing.assert_allclose(found["advantages"], expected, atol=1e-6)
    assert experience.can_train_before_batch_completes("actor")


def test_gpg_is_computed_once_all_groups_are_scored():
    experience, batch = Experience(config(algorithm__adv_estimator="gpg", rollout__n=2)), scored(0)
    for group in batch:
        experience.prepare([group])
    assert not any("advantages" in each for each in tensors(batch))
    assert not experience.can_train_before_batch_completes("actor")
    experience.complete(batch)
    assert any(each["advantages"].any() for each in tensors(batch))


@pytest.mark.parametrize("changes", [{"loss_mode": "kl_cov", "kl_cov_ratio": 0.2},
                                     {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.1}])  # fmt: skip
def test_tokens_are_selected_from_the_whole_batch_in_any_order_of_work(changes):
    experience = Experience(config(**{f"actor__{name}": value for name, value in changes.items()}))
    assert experience.actor_tensors == ("old_log_probs", "advantages", "selected")
    assert not experience.can_train_before_batch_completes("actor")
    assert experience.can_train_before_batch_completes("critic") and experience.fused_into_first_update
    whole, one_by_one = scored(1), scored(1)
    experience.prepare(whole)
    for number in reversed(range(len(one_by_one))):
        experience.prepare([one_by_one[number]])
    for batch in (whole, one_by_one):
        experience.complete(batch)
    found = [np.concatenate([each["selected"] for each in tensors(batch)]) for batch in (whole, one_by_one)]
    assert found[0].tolist() == found[1].tolist() and set(found[0]) == {0, 1}
    assert found[0].sum() == int(0.2 * len(found[0]))


@pytest.mark.parametrize("mode", ["kl_cov", "clip_cov"])
@pytest.mark.parametrize("kept", [(1, 3), ()])
def test_tokens_are_selected_from_those_in_the_loss(mode, kept):
    changes = {"actor__loss_mode": mode, "actor__kl_cov_ratio": 0.5, "actor__clip_cov_ratio": 0.5}
    experience = Experience(config(**changes, actor__clip_cov_lb=-9.0, actor__mask_truncated_completions=True))
    batch = groups([[9.0, 0.0], [1.0, -5.0]], [[3, 2], [4, 4]])
    samples = [sample for group in batch for sample in group.samples]
    for place, sample in enumerate(samples):
        sample.response = replace(sample.response, finish_reason="stop" if place in kept else "length")
    experience.prepare(batch)
    experience.complete(batch)
    counts = [int(sample.tensors["selected"].sum()) for sample in samples]
    assert (
        sum(counts) == sum(counts[place] for place in kept) == int(0.5 * sum(samples[k].response.length for k in kept))
    )


def test_no_early_training_with_dynamic_sampling():
    experience = Experience(config(algorithm__adv_estimator="grpo", algorithm__filter_groups__enable=True))
    assert not experience.can_train_before_batch_completes("actor") and not experience.can_train_before_batch_completes(
        "critic"
    )


PIPELINES = {
    "training__pipeline_parallel_size": 2,
    "actor__ppo_mini_batch_size": 16,
    "actor__use_kl_loss": True,
    "algorithm__adv_estimator": "grpo",
}


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"algorithm__adv_estimator": "gae"}, "the actor's training waits.*adv_estimator=gae"),
        ({"algorithm__adv_estimator": "grpo", "actor__zero_stage": 2}, "training waits.*actor.zero_stage=2"),
        ({"algorithm__adv_estimator": "gpg"}, "training waits.*adv_estimator=gpg reads the whole batch$"),
        (
            {"algorithm__adv_estimator": "grpo", "actor__loss_mode": "kl_cov"},
            "the actor's training waits.*loss_mode=kl_cov selects tokens of the whole batch",
        ),
        ({"algorithm__filter_groups__enable": True}, "training waits.*filter_groups.enable=true"),
        ({"algorithm__adv_estimator": "grpo"}, "^$"),
        ({"training__tensor_model_parallel_size": 2}, "scoring and training wait.*=2 ranks share.*a slot has only 1 "),
        (PIPELINES, "scoring and training wait.*pipeline_parallel_size=2 needs all ranks for each pass$"),
        (PIPELINES | {"fusion__training": "serial"}, "no scoring pass can fill.*fusion.training=serial"),
        (
            PIPELINES | {"algorithm__use_kl_in_reward": True},
            "no scoring pass can fill.*use_kl_in_reward=true needs the log-probs for advantages",
        ),
        (
            PIPELINES | {"algorithm__adv_estimator": "distill"},
            "no scoring pass can fill.*adv_estimator=distill needs the log-probs for advantages",
        ),
        (
            PIPELINES | {"algorithm__filter_groups__enable": True},
            "no scoring pass can fill.*enable=true selects groups",
        ),
        (
            PIPELINES | {"actor__ppo_mini_batch_size": 64},
            "no scoring pass can fill.*ppo_mini_batch_size=64 is the whole batch",
        ),
    ],
)
def test_the_overlap_blocker_names_the_setting(changes, key):
    assert re.search(key, Experience(config(**changes)).overlap_blocker())


@pytest.mark.parametrize(
    "changes, passes",
    [
        ({}, ()),
        ({"actor__use_kl_loss": True}, ("ref",)),
        ({"actor__ppo_epochs": 2}, ()),
        ({"training__pipeline_parallel_size": 2}, ()),
        ({"algorithm__filter_groups__enable": True}, ()),
        ({"algorithm__adv_estimator": "gae"}, ("values",)),
        ({"algorithm__use_kl_in_reward": True}, ("old_log_prob", "ref")),
        (correction(rollout_is="token"), ("old_log_prob",)),
        ({"algorithm__adv_estimator": "distill", "reward__model_path": "judge"}, ("old_log_prob", "ref")),
        ({"trainer__critic_warmup": 1, "algorithm__adv_estimator": "gae"}, ("values",)),
        ({"trainer__critic_warmup": 2, "algorithm__adv_estimator": "gae"}, ("old_log_prob", "values")),
    ],
)
def test_the_first_update_provides_old_log_probs_unless_they_are_needed_earlier(changes, passes):
    one = {"algorithm__adv_estimator": "grpo", "data__train_batch_size": 64, "actor__ppo_mini_batch_size": 64}
    experience = Experience(config(**one | changes))
    assert experience.kinds == ("reward", *passes)
    assert experience.fused_into_first_update == (() if "old_log_prob" in passes else ("old_log_prob",))
    assert "old_log_probs" in experience.actor_tensors  # later epochs read them
    several = Experience(config(**one | changes | {"actor__ppo_mini_batch_size": 63}))
    assert several.kinds == ("reward", "old_log_prob", *(kind for kind in passes if kind != "old_log_prob"))
    late = "algorithm__filter_groups__enable" in changes  # the samples of the first mini-batch are not known
    assert several.fused_into_first_update == (() if "old_log_prob" in passes or late else ("old_log_prob",))
    assert Experience(config(**one | changes | {"algorithm__old_log_probs": "engine"})).fused_into_first_update == ()


@pytest.mark.parametrize(
    "changes, deferred",
    [
        ({}, ("old_log_prob", "ref")),
        ({"algorithm__old_log_probs": "engine"}, ("ref",)),
        (correction(rollout_is="token"), ("ref",)),
        ({"algorithm__adv_estimator": "gae"}, ("old_log_prob", "ref")),
        ({"algorithm__use_kl_in_reward": True}, ()),
        ({"algorithm__adv_estimator": "distill"}, ()),
        ({"fusion__training": "serial"}, ()),
        ({"training__pipeline_parallel_size": 1}, ()),
    ],
)
def test_only_passes_read_solely_by_the_loss_are_deferred(changes, deferred):
    experience = Experience(config(**PIPELINES | changes))
    assert experience.deferred == deferred
    batch = scored(0)
    for sample in (sample for group in batch for sample in group.samples):
        for kind in deferred:
            del sample.tensors[PASSES[kind][1]]
    experience.prepare(batch)
    experience.complete(batch)
    assert all(np.isfinite(each["advantages"]).all() for each in tensors(batch))


def test_truncated_responses_count_in_the_baseline_but_not_in_the_loss():
    keys = dict(algorithm__adv_estimator="grpo", algorithm__norm_adv_by_std_in_grpo=False)
    experience = Experience(config(**keys, actor__mask_truncated_completions=True))
    batch = groups([[1.0, 0.0, 0.5]], [[2, 3, 1]])
    samples = batch[0].samples
    samples[1].response = replace(samples[1].response, finish_reason="length")
    prepare_and_complete(experience, batch)
    assert [sample.tensors["loss_mask"].tolist() for sample in samples] == [[1, 1], [0, 0, 0], [1]]
    np.testing.assert_allclose([s.tensors["advantages"][0] for s in samples], [0.5, -0.5, 0.0], atol=1e-6)
    assert [sample.trained_tokens("actor") for sample in samples] == [2, 0, 1]
    assert samples[1].trained_tokens("critic") == 3 and "loss_mask" in experience.actor_tensors
    assert "loss_mask" not in Experience(config(**keys)).actor_tensors
