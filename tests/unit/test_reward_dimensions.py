"""Rewards with several dimensions: GDPO, running normalisation, KL by source."""

import copy

import numpy as np
import pytest
import torch
from test_experience import config, groups, tensors

from rlfuse.algorithms.advantages import gdpo, grpo, whiten
from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.kl import kl_coefficient
from rlfuse.algorithms.objectives import actor_objective
from rlfuse.algorithms.shaping import Normaliser
from rlfuse.config.rewards import RewardEntry
from rlfuse.config.schema import ActorConfig
from rlfuse.samples import Reward

ONES = torch.ones(4, 3, dtype=torch.bool)


def standardised(values):
    return (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)


def test_gdpo_normalises_each_reward_before_summation():
    correct, short = [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 300.0, 400.0]
    dimensions = torch.tensor([correct, short], dtype=torch.float64).T
    found = gdpo(dimensions, torch.tensor([1.0, 0.5]), torch.zeros(4, dtype=torch.int64), ONES, by_std=True)
    expected = standardised(correct) + 0.5 * standardised(short)
    np.testing.assert_allclose(found, expected[:, None].repeat(3, 1), rtol=1e-6)


def test_gdpo_of_one_reward_is_grpo_and_ignores_rewards_that_do_not_apply():
    scores, index = torch.tensor([0.0, 1.0, 0.0, 3.0]), torch.tensor([0, 0, 1, 1])
    alone = gdpo(scores[:, None], torch.ones(1), index, ONES, by_std=True)
    assert torch.equal(alone, grpo(scores, index, ONES, by_std=True))
    other = torch.tensor([float("nan")] * 4)
    assert torch.equal(gdpo(torch.stack([scores, other], 1), torch.ones(2), index, ONES, by_std=True), alone)
    routed = torch.tensor([[0.0, np.nan], [1.0, np.nan], [np.nan, 0.0], [np.nan, 3.0]])
    assert torch.equal(gdpo(routed, torch.ones(2), index, ONES, by_std=True), alone)


def test_gdpo_distinguishes_rewards_with_equal_sums():
    """Check the example of the paper: under GRPO, rewards (0, 1) and (0, 2) give the same advantages."""
    index, mask = torch.zeros(2, dtype=torch.int64), ONES[:2]
    one = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    two = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    flat = [grpo(rewards.sum(1), index, mask, by_std=True) for rewards in (one, two)]
    torch.testing.assert_close(*flat, atol=1e-5, rtol=0)
    separate = [gdpo(rewards, torch.ones(2), index, mask, by_std=True) for rewards in (one, two)]
    torch.testing.assert_close(2 * separate[0], separate[1])


def test_whitening_by_response_counts_each_response_once():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([[3.0, 3.0, 3.0], [1.0, 0.0, 0.0]])
    found = whiten(advantages, mask, by_response=True)
    np.testing.assert_allclose(found, [[0.5**0.5] * 3, [-(0.5**0.5), 0, 0]], rtol=1e-6)


ENTRIES = [RewardEntry("m:a", "a", 2.0), RewardEntry("m:b", "b", 1.0, normalise=True), RewardEntry("g", "g", gate=True)]


def rewarded_groups(values, gate=()):
    """Return two groups of two samples with rewards of two dimensions (a, b)."""
    batch = groups([[0.0, 0.0], [0.0, 0.0]], [[3, 2], [1, 4]])
    for number, (sample, (a, b)) in enumerate(zip((s for g in batch for s in g.samples), values, strict=True)):
        closed = number in gate
        dimensions = {"a": 0.0, "b": 0.0} if closed else {"a": a, "b": b}
        value = 2 * dimensions["a"] + dimensions["b"]
        sample.reward = Reward(value, {}, None, dimensions, "g" if closed else None)
    return batch


def test_gdpo_in_a_step_includes_dimensions_and_the_length_penalty():
    changes = {"algorithm__adv_estimator": "gdpo", "data__max_response_length": 4, "reward__overlong_buffer__len": 2}
    batch = rewarded_groups([(0, 5), (1, 9), (1, 2), (0, 2)])
    experience = Experience(config(**changes), [ENTRIES[0], RewardEntry("m:b", "b", 1.0), ENTRIES[2]])
    experience.prepare(batch)
    assert not experience.can_train_before_batch_completes("actor")
    experience.complete(batch)
    first = 2 * standardised([0, 1]) + standardised([5, 9]) + standardised([-0.5, 0])
    second = 2 * standardised([1, 0]) + standardised([2, 2]) + standardised([0, -1])
    total = np.concatenate([first, second])
    expected = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose([t["advantages"][0] for t in tensors(batch)], expected, atol=1e-5)
    assert batch[1].samples[1].reward.parts["overlong_penalty"] == -1.0


# ---- running normalisation -----------------------------------------------------------------------------------------


def test_running_moments_equal_those_of_all_values():
    values = np.random.default_rng(0).normal(1e3, 2.0, size=40)
    normaliser = Normaliser(["b"])
    for part in (values[:7], values[7:8], values[8:]):
        metrics = normaliser.update([Reward(v, {}, None, {"b": v}) for v in part])
    assert metrics["reward/running_mean/b"] == pytest.approx(values.mean(), rel=1e-12)
    assert metrics["reward/running_std/b"] == pytest.approx(values.std(), rel=1e-9)
    found = normaliser.value(Reward(0, {}, None, {"a": 2.0, "b": 1e3}), {"a": 0.5, "b": 2.0})
    assert found == pytest.approx(1.0 + 2 * (1e3 - values.mean()) / values.std())


def test_running_normalisation_and_its_checkpoint():
    experience = Experience(config(algorithm__adv_estimator="rloo"), ENTRIES)
    first = rewarded_groups([(0, 5), (1, 9), (1, 2), (0, 4)], gate=[3])
    assert not experience.can_train_before_batch_completes("actor") and not experience.can_train_before_batch_completes(
        "critic"
    )
    experience.prepare(first)
    metrics = experience.complete(first)
    seen = np.array([5.0, 9.0, 2.0])  # the gate closed, so no function was called
    assert metrics["reward/running_mean/b"] == pytest.approx(seen.mean())
    scores = [t["token_rewards"].sum() for t in tensors(first)]
    expected = [*(2 * np.array([0, 1, 1]) + (seen - seen.mean()) / seen.std()), 0.0]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    resumed = Experience(experience.config, ENTRIES)
    resumed.normaliser.load_state_dict(copy.deepcopy(experience.normaliser.state_dict()))
    second = rewarded_groups([(0, 1), (1, 2), (1, 3), (0, 4)])
    assert resumed.can_train_before_batch_completes("actor")
    resumed.prepare(second)
    scores = [t["token_rewards"].sum() for t in tensors(second)]
    np.testing.assert_allclose(scores, 2 * np.array([0, 1, 1, 0]) + (np.arange(1, 5) - seen.mean()) / seen.std(), 1e-6)
    before = copy.deepcopy(tensors(second))
    resumed.complete(second)
    assert all((a["advantages"] == b["advantages"]).all() for a, b in zip(before, tensors(second), strict=True))


def test_constant_values_are_only_centred():
    normaliser = Normaliser(["b"])
    normaliser.update([Reward(0.1, {}, None, {"b": 0.1})] * 3)
    assert normaliser.value(Reward(1.0, {}, None, {"b": 1.1}), {"b": 1.0}) == pytest.approx(1.0)


# ---- KL by source --------------------------------------------------------------------------------------------------

BY_SOURCE = {"math/*": 0.0, "s": 0.5}


def test_the_first_matching_source_sets_the_coefficient():
    assert [kl_coefficient(source, BY_SOURCE, 9.0) for source in ("math/1", "s", "math", "t")] == [0.0, 0.5, 9.0, 9.0]


def groups_of_two_sources():
    """Return two groups of one sample, from different sources."""
    from dataclasses import replace

    batch = groups([[1.0], [1.0]], [[2], [2]])
    batch[1].prompt = batch[1].samples[0].prompt = replace(batch[1].prompt, data_source="math/1")
    return batch


def test_kl_in_the_reward_is_weighted_by_source():
    changes = {"algorithm__use_kl_in_reward": True, "algorithm__kl_coef_by_source": BY_SOURCE}
    experience, batch = Experience(config(**changes)), groups_of_two_sources()
    experience.prepare(batch)
    np.testing.assert_allclose([t["token_rewards"] for t in tensors(batch)], [[-0.25, 0.75], [0.0, 1.0]], atol=1e-6)
    assert experience.complete(batch)["actor/reward_kl_penalty_coeff"] == pytest.approx(0.25)


def test_kl_in_the_loss_is_weighted_by_source():
    changes = {"actor__use_kl_loss": True, "actor__kl_loss_type": "k2", "algorithm__kl_coef_by_source": BY_SOURCE}
    experience, batch = Experience(config(**changes)), groups_of_two_sources()
    experience.prepare(batch)
    assert experience.complete(batch)["actor/kl_coef"] == pytest.approx(0.25)
    assert experience.actor_tensors == ("old_log_probs", "advantages", "ref_log_probs", "kl_coefs")
    rows = {name: torch.tensor(np.stack([t[name] for t in tensors(batch)])) for name in experience.actor_tensors}
    rows["advantages"] = torch.zeros(2, 2)
    settings = ActorConfig(use_kl_loss=True, kl_loss_type="k2", kl_loss_coef=9.0)
    loss, sums = actor_objective(settings, rows["old_log_probs"], torch.zeros(2, 2), torch.ones(2, 2), rows, 4)
    assert loss == pytest.approx(0.5 * 2 * 0.125) and sums["kl_loss"] == pytest.approx(4 * 0.125)  # difference 0.5 nats
