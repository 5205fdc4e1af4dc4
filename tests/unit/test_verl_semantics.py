"""Keys with verl's name have verl's meaning: formulas of verl 0.9.1 are compared with rlfuse.

`KEYS_BY_TEST` lists the test of each key, here or in another file; `NOTHING_TO_COMPUTE` lists keys without formula.
"""

import asyncio
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus
from worlds.playing import PATIENCE_S, World
from worlds.scenes import Scene

from rlfuse.algorithms.advantages import advantages_and_returns, whiten
from rlfuse.algorithms.corrections import correction_weights
from rlfuse.algorithms.kl import KL_KINDS, AdaptiveKl, kl_estimate
from rlfuse.algorithms.learning_rate import lr_factor, lr_factors
from rlfuse.algorithms.losses import AGG_MODES, loss_divisor, loss_sum
from rlfuse.algorithms.objectives import actor_objective, critic_objective
from rlfuse.config import sampling
from rlfuse.config.documentation import by_name
from rlfuse.config.estimators import ESTIMATORS
from rlfuse.config.other_frameworks import SAME_NAME, counterpart
from rlfuse.config.schema import ActorConfig, Config, CriticOptim, DataConfig, OptimConfig, RolloutCorrection
from rlfuse.config.trainer import TrainerConfig
from rlfuse.data.prompts import _fit
from rlfuse.progress import is_due
from rlfuse.run.job import training_steps
from rlfuse.simulate.clock import run_virtual

UNITS = Path(__file__).parent
VERL_KEYS = json.loads((UNITS / "verl_keys.json").read_text())

KEYS_BY_TEST = {
    "test_the_learning_rate_follows_verls_scheduler": " ".join(
        f"{model}.optim.{leaf}"
        for model in ("actor", "critic")
        for leaf in ("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "min_lr_ratio")
    ),
    "test_learning_rate_per_step_and_critic_warmup": "actor.ppo_epochs "
    "trainer.critic_warmup actor.ppo_mini_batch_size data.train_batch_size rollout.n",
    "test_a_run_ends_with_its_steps_or_epochs": "trainer.total_epochs trainer.total_training_steps",
    "test_checkpoints_and_validations_follow_verls_schedule": "trainer.save_freq trainer.test_freq",
    "test_actor_loss": "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high actor.clip_ratio_c "
    "actor.entropy_coeff actor.use_kl_loss actor.kl_loss_coef actor.loss_agg_mode actor.loss_mode "
    "actor.tau_pos actor.tau_neg",
    "test_journal.py": "trainer.rollout_data_dir trainer.validation_data_dir",
    "test_covariance.py": "actor.clip_cov_ratio actor.clip_cov_lb actor.clip_cov_ub actor.kl_cov_ratio "
    "actor.ppo_kl_coef",
    "test_critic_loss": "critic.cliprange_value",
    "test_kl_estimates": "actor.kl_loss_type algorithm.kl_penalty",
    "test_the_kl_in_the_reward_and_its_controller": "algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef "
    "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon algorithm.use_kl_in_reward",
    "test_advantages": "algorithm.adv_estimator algorithm.gamma algorithm.lam algorithm.norm_adv_by_std_in_grpo",
    "test_gdpo_whitening_by_response_equals_verl_for_equal_lengths": "",
    "test_importance_weights": "algorithm.rollout_correction.rollout_is "
    "algorithm.rollout_correction.rollout_is_threshold",
    "test_corrections.py": "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
    "test_long_prompts_are_truncated_like_in_verl": "data.truncation data.max_prompt_length",
    "test_sampling_parameters_follow_their_keys": "rollout.temperature rollout.top_p rollout.top_k "
    "rollout.val_kwargs.temperature rollout.val_kwargs.top_p rollout.val_kwargs.top_k data.max_response_length",
    "test_dynamic_sampling.py": "algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
    "test_data.py": "data.filter_overlong_prompts data.shuffle data.seed data.prompt_key data.train_files "
    "data.apply_chat_template_kwargs data.val_files rollout.val_kwargs.n",
    "test_first_update.py": "actor.optim.betas critic.optim.betas critic.optim.weight_decay",
    "test_resumed_settings.py": "actor.optim.weight_decay actor.grad_clip",
    "test_checkpoints.py": "trainer.max_ckpt_to_keep trainer.resume_mode",
}
"""Test in this file, or test file -> keys that it compares."""
NOTHING_TO_COMPUTE = {
    "names and files": "model.path critic.path trainer.default_local_dir trainer.project_name trainer.experiment_name "
    "trainer.logger trainer.log_val_generations rollout.name model.trust_remote_code",
    "memory, processes and devices": "actor.offload_optimizer actor.ppo_max_token_len_per_gpu reward.num_workers "
    "actor.ppo_micro_batch_size_per_gpu model.enable_activation_offload model.enable_gradient_checkpointing "
    "model.use_remove_padding rollout.gpu_memory_utilization rollout.max_num_seqs rollout.tensor_model_parallel_size "
    "rollout.free_cache_engine rollout.update_weights_bucket_mb trainer.n_gpus_per_node trainer.nnodes cluster.device",
    "on or off": "trainer.val_before_train video.freeze_vision_tower rollout.quantization",
}
"""Reason -> keys that are not part of a formula."""


def names(table):
    return [key for keys in table.values() for key in keys.split()]


def test_each_key_with_a_name_of_verl_is_tested_once():
    known, same = frozenset(by_name()), set()
    for name in VERL_KEYS:
        found = None if name in known else counterpart(name, known)
        same |= {name} & known | (
            {*found.keys} & known if found and found.origin == "verl" and found.is_same else set()
        )
    listed = names(KEYS_BY_TEST) + names(NOTHING_TO_COMPUTE)
    assert sorted(listed) == sorted(same) and set(SAME_NAME) <= same
    for test in KEYS_BY_TEST:
        assert (UNITS / test).is_file() if test.endswith(".py") else callable(globals()[test])


# The run --------------------------------------------------------------------------------------------------------------


def verls_rate(kind, advances, warmup, total, least=0.0):
    """Return the fraction of the learning rate after this many steps of verl's scheduler (one per training step)."""
    if advances < warmup:
        return advances / max(1, warmup)
    start, end = warmup, total
    if kind == "wsd":  # verl's stable_ratio is 0.9
        start += int((total - warmup) * 0.9)
        end += 0 if advances >= start else math.inf
    progress = (advances - start) / max(1, end - start)
    if kind == "constant" or progress < 0:
        return 1.0
    if kind == "linear":  # as in Megatron-LM and transformers
        return max(least, 1 - (1 - least) * progress)
    return max(least, math.cos(math.pi * progress) * (1 - least) / 2 + (1 + least) / 2)


@pytest.mark.parametrize(
    "kind, least", [("constant", 0), ("linear", 0.1), ("cosine", 0), ("cosine", 0.2), ("wsd", 0.1)]
)
@pytest.mark.parametrize(
    "warmup, ratio, counted", [(-1, 0.0, 0), (0, 0.25, 5), (3, 0.25, 3), (-1, 0.13, 2), (20, 0, 20)]
)
def test_the_learning_rate_follows_verls_scheduler(kind, least, warmup, ratio, counted):
    config, total = Config(), 20
    config.actor.optim = OptimConfig(
        lr_warmup_steps=warmup, lr_warmup_steps_ratio=ratio, lr_scheduler_type=kind, min_lr_ratio=least
    )
    config.critic.optim = CriticOptim(**vars(config.actor.optim))
    expected = [verls_rate(kind, step, counted, total, least) for step in range(total)]
    for mini_batch, epochs in ((64, 1), (4, 3)):
        config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = mini_batch, epochs
        found = [lr_factors(config, step, total) for step in range(1, total + 1)]
        assert [each["actor"] for each in found] == [each["critic"] for each in found] == pytest.approx(expected)
    config.trainer.critic_warmup = 9  # the actor trains in 12 steps, but verl's schedule has 20
    for step in range(9, total + 1):
        with_warmup = lr_factors(config, step, total)
        assert with_warmup["critic"] == pytest.approx(expected[step - 1])
        assert with_warmup["actor"] == pytest.approx(verls_rate(kind, step - 9, counted, 12, least))
    assert (kind, least) != ("cosine", 0) or counted == 20 or expected[11] > 0.25 > 0.1 > with_warmup["actor"] > 0


@pytest.mark.parametrize("given, decay", [(4, 4), (99, 15), (None, 2)])
def test_a_wsd_schedule_decays_over_its_last_steps(given, decay):
    optim = OptimConfig(lr_warmup_steps=5, lr_scheduler_type="wsd", lr_wsd_decay_steps=given, min_lr_ratio=0.1)
    stable = [step / 5 for step in range(5)] + [1.0] * (15 - decay)
    last = [0.1 + 0.9 * math.cos(math.pi * step / (2 * decay)) ** 2 for step in range(decay)]
    assert [lr_factor(optim, step, 20) for step in range(1, 21)] == pytest.approx(stable + last)
    assert lr_factor(optim, 21, 20) == pytest.approx(0.1)


class RateRecorder(World):
    """A simulated run that records model and learning rate of every update."""

    def __init__(self, scene, critic_warmup):
        super().__init__(scene)
        self.critic_warmup, self.rates = critic_warmup, defaultdict(list)
        self.experience.config, step = self.config(), self.trainer.step

        async def record_rate(model, lengths, lr_factor, skipped=()):
            self.rates[self.stopping.step].append((model, lr_factor))
            return await step(model, lengths, lr_factor, skipped)

        self.trainer.step = record_rate

    def config(self):
        config = super().config()
        config.trainer.critic_warmup = self.critic_warmup
        config.actor.optim = OptimConfig(lr_warmup_steps=2, lr_scheduler_type="cosine")
        config.critic.optim = CriticOptim(lr_warmup_steps=1)
        return config

    def log_step(self, step, board, spans):
        self.trainer.steps.clear()
        self.scored.clear()
        self.experience.prepared.clear()
        self.experience.completed = 0


@pytest.mark.parametrize("critic_warmup", [0, 1, 3])
def test_learning_rate_per_step_and_critic_warmup(critic_warmup):
    scene = Scene("serial", batch=4, mini_batch=2, epochs=2, estimator="gae", steps=5, prompts=20)
    world = RateRecorder(scene, critic_warmup)
    run_virtual(asyncio.wait_for(world.run(), PATIENCE_S))
    for step in range(1, 6):
        models = ["critic", "actor"] if critic_warmup <= step else ["critic"]  # verl: actor where critic_warmup <= step
        rates = lr_factors(world.config(), step, 5)
        assert sorted(world.rates[step]) == sorted([(model, rates[model]) for model in models] * 4)


@pytest.mark.parametrize("steps, epochs", [(7, None), (7, 1), (7, 3), (None, 3), (None, None), (3, 2)])
def test_a_run_ends_with_its_steps_or_epochs(steps, epochs):
    per_epoch, taken = 5, 0
    while taken // per_epoch < (epochs or (1 if steps is None else 99)) and taken < (steps or 99):
        taken += 1
    assert training_steps(TrainerConfig(total_training_steps=steps, total_epochs=epochs), per_epoch) == taken


@pytest.mark.parametrize("every", [-1, 0, 1, 3, 50])
def test_checkpoints_and_validations_follow_verls_schedule(every):
    for step in range(1, 8):
        assert is_due(every, step, 7) == (every > 0 and (step == 7 or step % every == 0))


# Losses ---------------------------------------------------------------------------------------------------------------


def batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 6, 1, 5])
    mask = torch.arange(6)[None, :] < lengths[:, None]
    return mask, lambda: torch.randn(mask.shape, generator=rng)


def aggregated(matrix, mask, mode, longest):
    """Return the loss like verl's agg_loss over the whole mini-batch."""
    if mode == "token-mean":
        return (matrix * mask).sum() / mask.sum()
    rows = (matrix * mask).sum(-1)
    return (rows / mask.sum(-1) if mode == "seq-mean-token-mean" else rows).sum() / len(mask) / (
        longest if mode == "seq-mean-token-sum-norm" else 1
    )  # fmt: skip


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "gpg", "sapo"])
@pytest.mark.parametrize("clip", [(0.2, None, None, 3.0), (0.2, 0.1, 0.3, 1.5), (0.3, None, 0.05, 3.0)])
def test_actor_loss(mode, loss_mode, clip):
    mask, draw = batch()
    both, low, high, c = clip
    new, old, ref, advantages, entropy = draw(), draw(), draw(), draw(), softplus(draw())
    settings = ActorConfig(
        clip_ratio=both, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c, loss_mode=loss_mode
    )
    settings.loss_agg_mode, settings.entropy_coeff, settings.use_kl_loss = mode, 0.03, True
    settings.kl_loss_coef, settings.kl_loss_type = 0.2, "low_var_kl"
    tensors = {"old_log_probs": old, "advantages": advantages, "ref_log_probs": ref}
    loss, _ = actor_objective(settings, new, entropy, mask, tensors, 9)
    log_ratio = new - old
    if loss_mode == "gspo":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1))[:, None].expand(mask.shape)
    low, high = both if low is None else low, both if high is None else high
    ratio = log_ratio.exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if loss_mode == "cispo":
        policy = -ratio.clamp(1 - low, 1 + high) * advantages * new
    elif loss_mode == "gpg":
        policy = -advantages * new
    elif loss_mode == "sapo":
        tau = torch.where(advantages > 0, 1.0, 1.05)
        policy = -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    if loss_mode == "vanilla":
        policy = torch.where(advantages < 0, torch.minimum(policy, -advantages * c), policy)
    difference = (ref - new).clamp(-20, 20)
    kl = (difference.exp() - difference - 1).clamp(-10, 10)
    expected = [aggregated(each, mask, mode, 9) for each in (policy, entropy, kl)]
    count = loss_divisor(mask.sum(-1).numpy(), mode, 9)
    assert float(loss) / count == pytest.approx(float(expected[0] - 0.03 * expected[1] + 0.2 * expected[2]), rel=1e-5)


@pytest.mark.parametrize("mode", AGG_MODES)
def test_critic_loss(mode):
    mask, draw = batch(1)
    new, old, returns = draw(), draw(), draw()
    loss, _ = critic_objective(0.5, mode, new, mask, {"values": old, "returns": returns}, 9)
    clipped = torch.minimum(torch.maximum(new, old - 0.5), old + 0.5)
    expected = 0.5 * aggregated(torch.maximum((new - returns) ** 2, (clipped - returns) ** 2), mask, mode, 9)
    assert float(loss) / loss_divisor(mask.sum(-1).numpy(), mode, 9) == pytest.approx(float(expected), rel=1e-5)
    assert float(loss_sum(new, mask, mode, 9)) == pytest.approx(float(aggregated(new, mask, mode, 9)) * loss_divisor(
        mask.sum(-1).numpy(), mode, 9), rel=1e-5)  # fmt: skip


def test_kl_estimates():
    _, draw = batch(2)
    new, ref = 3 * draw(), 3 * draw()
    difference = new - ref
    expected = {"kl": difference, "abs": difference.abs(), "mse": difference**2 / 2}
    expected["low_var_kl"] = ((-difference).exp() + difference - 1).clamp(-10, 10)
    alias = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
    for name in KL_KINDS:
        torch.testing.assert_close(kl_estimate(new, ref, name), expected[alias.get(name, name)], rtol=1e-4, atol=1e-5)


# Rewards and advantages -----------------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_and_its_controller():
    # The KL per token is tested in `test_experience.py`.
    control, fixed, value = AdaptiveKl(0.02, 0.5, 200), AdaptiveKl(0.02), 0.02
    for kl, count in ((0.1, 64), (0.52, 64), (9.0, 32)):
        value *= 1 + float(np.clip(kl / 0.5 - 1, -0.2, 0.2)) * count / 200
        control.update(kl, count)
        fixed.update(kl, count)
    assert control.value == pytest.approx(value) and fixed.value == 0.02 and Config().algorithm.kl_ctrl.type == "fixed"


def whitened(x, mask):
    picked = x[mask]
    return (x - picked.mean()) / torch.sqrt(picked.var() + 1e-8) * mask


def verls_advantages(name, rewards, values, mask, gamma, lam, by_std):
    """Return advantages for groups of two consecutive rows."""
    scores, result, running, next_value = rewards.sum(-1), torch.zeros_like(rewards), torch.zeros(4), torch.zeros(4)
    pairs = scores.view(2, 2)
    if name == "grpo":
        spread = pairs.std(-1, keepdim=True) + 1e-6 if by_std else 1.0
        return ((pairs - pairs.mean(-1, keepdim=True)) / spread).reshape(4, 1) * mask
    if name == "rloo":
        return (pairs * 2 - pairs.mean(-1, keepdim=True) * 2).reshape(4, 1) * mask
    if name == "remax":
        return (rewards.flip(-1).cumsum(-1).flip(-1) - BASELINES[:, None]) * mask
    if name in ("opo", "gpg", "reinforce_plus_plus_baseline"):
        lengths = mask.sum(-1).view(2, 2) if name == "opo" else torch.ones(2, 2)
        centred = (pairs - (lengths * pairs).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True)).reshape(4, 1) * mask
        return whitened(centred, mask) if name == "reinforce_plus_plus_baseline" else centred
    for t in reversed(range(mask.shape[1])):
        keep = mask[:, t]
        delta = rewards[:, t] + (gamma * next_value - values[:, t] if name == "gae" else 0)
        running = torch.where(keep, delta + gamma * (lam if name == "gae" else 1) * running, running)
        next_value = torch.where(keep, values[:, t], next_value)
        result[:, t] = running
    return whitened(result, mask)


BASELINES = torch.tensor([0.5, 0.5, -1.0, -1.0])
NAMES = ["gae", "grpo", "rloo", "remax", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_std", [True, False])
def test_advantages(name, by_std):
    mask, draw = batch(3)
    rewards, values, groups = draw() * mask, draw() * mask, torch.tensor([0, 0, 1, 1])
    found, _ = advantages_and_returns(name, rewards, values, groups, mask, 0.9, 0.8, by_std, n=2, baselines=BASELINES)
    found = whiten(found, mask) if ESTIMATORS[name].whitens else found
    expected = verls_advantages(name, rewards, values, mask, 0.9, 0.8, by_std)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths, same", [([4, 4, 4, 4], True), ([1, 6, 2, 6], False)])
def test_gdpo_whitening_by_response_equals_verl_for_equal_lengths(lengths, same):
    mask = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    dimensions = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.5, 1.0], [2.0, 0.0]])
    weights, groups = torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 1, 1])
    found, _ = advantages_and_returns("gdpo", 0.0 * mask, None, groups, mask, dimensions=(dimensions, weights), n=2)
    pairs = dimensions.view(2, 2, 2)
    each = (pairs - pairs.mean(1, keepdim=True)) / (pairs.std(1, keepdim=True) + 1e-6)
    summed = (each.view(4, 2) @ weights)[:, None] * mask
    torch.testing.assert_close(found, summed, rtol=1e-4, atol=1e-5)
    ours, verls = whiten(found, mask, by_response=True), whitened(summed, mask)
    rows = ours[:, 0]
    assert float(rows.mean()) == pytest.approx(0, abs=1e-6) and float(rows.std()) == pytest.approx(1, abs=1e-5)
    ratio = (verls[:, 0] / rows).tolist()  # verl's variance uses the number of response tokens minus one
    assert (ratio == pytest.approx([math.sqrt(4 / 3 * 15 / 16)] * 4, rel=1e-4)) == same


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(level):
    mask, draw = batch(4)
    trainer, engine = draw(), draw()
    log_ratio = trainer - engine
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True)
    expected = log_ratio.clamp(-20, 20).exp().clamp(max=2.0) * mask
    torch.testing.assert_close(correction_weights(RolloutCorrection(level), trainer, engine, mask), expected)


# Data and sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut, kept", [("left", [3, 4, 5, 6, 7]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 5, 6, 7])]
)
def test_long_prompts_are_truncated_like_in_verl(cut, kept):
    ids, _ = _fit(np.arange(1, 8), [], [], DataConfig(max_prompt_length=5, truncation=cut), "row 0")
    assert ids.tolist() == kept


def test_sampling_parameters_follow_their_keys():
    config = Config()
    config.rollout.temperature, config.rollout.top_p, config.rollout.top_k = 0.7, 0.9, 40
    held_out = config.rollout.val_kwargs
    held_out.temperature, held_out.top_p, held_out.top_k, config.data.max_response_length = 0.0, 0.8, 20, 99
    for drawn, expected in (
        (sampling.training(config), (0.7, 0.9, 40, 99)),
        (sampling.validation(config), (0.0, 0.8, 20, 99)),
    ):
        assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens) == expected
