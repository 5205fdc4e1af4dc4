"""Turn scored samples into training inputs: shaped rewards, KL penalty, advantages, returns, importance weights.

The controller calls `prepare` for each group with complete scores, and `complete` once all groups have them, for
everything that depends on the whole batch. Scores that only the loss reads (`deferred`) may arrive later; `mismatch` is
called at the end of the step. Results do not depend on how a step is split into calls of `prepare`.
State across steps and checkpoints: the KL coefficient and the running normalisation of rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlfuse.algorithms import registry
from rlfuse.algorithms.advantages import advantages_and_returns, place_at_end, whiten
from rlfuse.algorithms.corrections import correction_weights, mismatch_metrics
from rlfuse.algorithms.covariance import SELECTING, covariances, select_tokens
from rlfuse.algorithms.kl import AdaptiveKl, kl_coefficient, kl_estimate
from rlfuse.algorithms.shaping import Normaliser, has_zero_std, overlong_penalty
from rlfuse.algorithms.zero_advantage import has_only_zero_terms, may_skip
from rlfuse.config.custom_functions import DECORATOR, traits_of
from rlfuse.config.declare import names_function
from rlfuse.config.rewards import RewardEntry
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.samples import Group, Reward, Sample, flattened, padded, per_row

SAME, ROUNDING = 1e-4, 1e-6
"""Tolerances for rounding, relative to the batch's largest estimate and to its largest score."""
POLICIES = ("old_log_probs", "ref_log_probs")
"""Tensors of a sample with the log-probs of the policy before the update and of the reference."""


class Experience:
    """Advantage computation of a run, between scoring and training.

    `entries`: the loaded reward functions; without them a reward has only its total value.
    """

    def __init__(self, config: Config, entries: Sequence[RewardEntry] = ()):
        self.config = config
        registry.clear_cache()  # files may have changed since the last run in this process (notebooks)
        self.traits = traits_of(config.algorithm.adv_estimator)
        self._group_by_group = names_function(config.algorithm.adv_estimator) and not self.traits.needs_batch
        self._unverified = self._group_by_group
        """True until a batch has confirmed that the custom estimator depends on the row's group only."""
        self.weights = {entry.name: entry.weight for entry in entries if not entry.gate}
        self.normaliser = Normaliser(entry.name for entry in entries if entry.normalise)
        ctrl = config.algorithm.kl_ctrl
        self.kl = AdaptiveKl(ctrl.kl_coef, ctrl.target_kl if ctrl.type == "adaptive" else None, ctrl.horizon)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of scoring that every sample needs, in serial order."""
        fused = self._one_part and bool(self.fused_into_first_update)
        wanted = {
            "reward": self.config.uses_rewards,
            "old_log_prob": self.config.algorithm.old_log_probs == "trainer" and not fused,
            "ref": self.config.uses_reference,
            "values": self.config.uses_critic,
        }
        return tuple(kind for kind, needed in wanted.items() if needed)

    @property
    def fused_into_first_update(self) -> tuple[str, ...]:
        """Kinds of scoring that the forward pass of the actor's first update provides.

        Old log-probs are those of the weights before the step's first update, so the first mini-batch's forward pass
        computes them. A separate pass is needed for later mini-batches, if the log-probs are needed earlier (KL in the
        reward, distillation, importance weights), if the first mini-batch is not known in advance, and in steps that
        train the critic only. Values are needed for the advantages, and the reference has other weights.
        """
        config, algorithm = self.config, self.config.algorithm
        before = self._advantages_read_reference or algorithm.rollout_correction.is_enabled
        chosen_late = config.fusion.data != "exact" or algorithm.filter_groups.enable
        unknown = config.trainer.critic_warmup > 1 or (chosen_late and not self._one_part)
        return () if algorithm.old_log_probs != "trainer" or before or unknown else ("old_log_prob",)

    @property
    def _advantages_read_reference(self) -> bool:
        """True if advantages depend on the log-probs of policy and reference."""
        return self.config.algorithm.use_kl_in_reward or self.traits.needs_reference

    @property
    def _one_part(self) -> bool:
        """True if the whole batch is one mini-batch."""
        return self.config.actor.ppo_mini_batch_size >= self.config.data.train_batch_size

    @property
    def actor_tensors(self) -> tuple[str, ...]:
        """Per-token arrays that the actor's loss reads."""
        extra = ["ref_log_probs"] if self.config.actor.use_kl_loss else []
        extra += ["kl_coefs"] if self._kl_loss_by_source else []
        extra += ["is_weights"] if self.config.algorithm.rollout_correction.is_enabled else []
        extra += ["selected"] if self._selects_tokens else []
        extra += ["loss_mask"] if self.config.actor.mask_truncated_completions else []
        return ("old_log_probs", "advantages", *extra)

    @property
    def deferred(self) -> tuple[str, ...]:
        """Kinds of scoring that only the actor's loss reads, scheduled into pipeline bubbles."""
        pipelined = self.config.training.pipeline_parallel_size > 1 and not self._why_not_deferred()
        return self._kinds_of_loss if pipelined else ()

    @property
    def loss_only(self) -> tuple[str, ...]:
        """Kinds of scoring that only the actor's loss reads and that samples without a term in it do not need.

        Advantages do not wait for them.
        """
        drops = may_skip(self.config.actor) or self.config.algorithm.filter_groups.enable
        return self._kinds_of_loss if drops and not self._advantages_read_reference else ()

    @property
    def _kinds_of_loss(self) -> tuple[str, ...]:
        """Kinds of scoring that the actor's loss reads, without old log-probs that importance weights need."""
        corrected = self.config.algorithm.rollout_correction.is_enabled
        return tuple(kind for kind in self.kinds if kind == "ref" or (kind == "old_log_prob" and not corrected))

    def skipped(self, groups: Sequence[Group]) -> list[str]:
        """Return the ids of the samples whose actor passes are skipped, of groups with their final advantages."""
        samples = (sample for group in groups for sample in group.samples)
        return [each.id for each in samples if has_only_zero_terms(self.config.actor, each.tensors, each.loss_mask)]

    def groups_with_nonzero_std(self, groups: Sequence[Group]) -> list[int]:
        """Return the indices of the groups that dynamic sampling keeps: groups whose rewards are not all equal.

        Groups whose baseline has no score are not kept, since they are not trained on.
        """
        rewards = [
            [s.reward.value for s in group.samples if isinstance(s.reward, Reward)]
            if group.baseline is None or isinstance(group.baseline.reward, Reward)
            else []
            for group in groups
        ]
        return [i for i, flat in enumerate(has_zero_std(rewards, self.config.rollout.n)) if not flat]

    def can_train_before_batch_completes(self, model: str) -> bool:
        """Return whether a model's loss on a group can be computed before other groups are finished.

        False if it depends on the whole batch, in the first step with running normalisation of rewards, and until a
        custom estimator has been verified.
        """
        return not (self.requires_batch(model) or self.normaliser.lacks_statistics or self._unverified)

    def requires_batch(self, model: str) -> bool:
        """Return whether a model's loss on a group depends on the other groups of the step, in every step."""
        chosen_late = self.config.algorithm.filter_groups.enable
        of_actor = bool(self.traits.whitens) or self._selects_tokens
        return chosen_late or self.traits.needs_batch or (model == "actor" and of_actor)

    def overlap_blocker(self) -> str:
        """Return the reason why some gradients must wait for the end of generation; empty if none must."""
        algorithm = self.config.algorithm
        if (stages := self.config.training.pipeline_parallel_size) > 1:
            key = f"training.pipeline_parallel_size={stages}"
            why = self._why_not_deferred()
            return f"scoring and training wait for all responses: {key} needs all ranks for each pass" + (
                f"; no scoring pass can fill the pipeline bubbles: {why}" if why else ""
            )
        width, engines = self.config.training.tensor_model_parallel_size, self.config.rollout.tensor_model_parallel_size
        if engines % width:
            return (
                f"scoring and training wait for all responses: training.tensor_model_parallel_size={width} ranks share "
                f"a model, but a slot has only {engines} of them (rollout.tensor_model_parallel_size)"
            )
        if self.config.sharded_gradients:
            return f"training waits for all responses: {self.config.sharding} needs all ranks for each gradient"
        if algorithm.filter_groups.enable:
            key = "algorithm.filter_groups.enable=true"
            return f"training waits for all responses: {key} selects groups after all are scored"
        key = f"algorithm.adv_estimator={algorithm.adv_estimator}"
        if self.traits.needs_batch:
            remedy = f"; if it needs only the row's group, declare @{DECORATOR}(needs_batch=False)"
            is_custom = names_function(algorithm.adv_estimator)
            return f"training waits for all responses: {key} reads the whole batch" + remedy * is_custom
        if self.traits.whitens:
            return f"the actor's training waits for all responses: {key} normalises its advantages over the batch"
        if self._selects_tokens:
            key = f"actor.loss_mode={self.config.actor.loss_mode}"
            return f"the actor's training waits for all responses: {key} selects tokens of the whole batch"
        return ""

    def _why_not_deferred(self) -> str:
        """Return the reason why scoring can't be deferred to the previous mini-batch's training; empty if it can."""
        algorithm, actor = self.config.algorithm, self.config.actor
        if self.config.fusion.training != "fused":
            return f"fusion.training={self.config.fusion.training} runs one model after the other"
        if algorithm.use_kl_in_reward:
            return "algorithm.use_kl_in_reward=true needs the log-probs for advantages (actor.use_kl_loss does not)"
        if self.traits.needs_reference:
            return f"algorithm.adv_estimator={algorithm.adv_estimator} needs the log-probs for advantages"
        if algorithm.filter_groups.enable:
            return "algorithm.filter_groups.enable=true selects groups after all are scored"
        if self._one_part:
            return f"actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} is the whole batch, there is no next one"
        return ""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Fill `token_rewards`, `is_weights`, `loss_mask` (and `old_log_probs`).

        Also fill `advantages` (not whitened yet) and `returns`, unless the estimator reads the whole batch.
        """
        samples = [sample for group in groups for sample in group.samples]
        algorithm = self.config.algorithm
        for sample in samples:
            if algorithm.old_log_probs == "engine":
                sample.tensors["old_log_probs"] = sample.response.log_probs
            if self.config.actor.mask_truncated_completions:
                kept = sample.response.finish_reason != "length"
                sample.tensors["loss_mask"] = np.full(len(sample.response.token_ids), kept, np.float32)
        mask = _mask(samples)
        self._correct(samples, mask)
        token_rewards = self._token_rewards(samples, mask)
        if algorithm.use_kl_in_reward:  # Ouyang et al. 2022, arXiv 2203.02155
            token_rewards = token_rewards - self._kl_coefficients(samples, self.kl.value) * self._kl(samples, mask)
        if self._kl_loss_by_source:
            coefficients = self._kl_coefficients(samples, self.config.actor.kl_loss_coef)
            _spread(samples, mask, kl_coefs=coefficients.expand(mask.shape))
        _spread(samples, mask, token_rewards=token_rewards)
        if not self.traits.needs_batch:
            for part in [[group] for group in groups] if self._group_by_group else [groups]:
                self._estimate(part)

    def _estimate(self, groups: Sequence[Group]) -> None:
        """Fill `advantages` and `returns` with one call of the estimator."""
        samples = [sample for group in groups for sample in group.samples]
        algorithm, mask = self.config.algorithm, _mask(samples)
        advantages, returns = advantages_and_returns(
            algorithm.adv_estimator,
            _matrix(samples, "token_rewards"),
            _matrix(samples, "values") if self.config.uses_critic else None,
            torch.tensor([i for i, group in enumerate(groups) for _ in group.samples]),
            mask,
            algorithm.gamma,
            algorithm.lam,
            algorithm.norm_adv_by_std_in_grpo,
            self._dimensions(samples) if self.weights and self.traits.each_reward else None,
            self.config.rollout.n,
            self._baselines(groups) if self.traits.needs_baseline else None,
            **{name: _matrix(samples, name) for name in POLICIES if self.traits.needs_reference},
            kwargs=algorithm.adv_estimator_kwargs,
        )
        _spread(samples, mask, advantages=advantages, returns=returns)

    def _baselines(self, groups: Sequence[Group]) -> torch.Tensor:
        """Return the score of the greedy response to each sample's prompt, float32 [B]."""
        baselines = [group.baseline for group in groups if group.baseline is not None]
        scores = self._token_rewards(baselines, _mask(baselines)).sum(-1)
        return scores.repeat_interleave(torch.tensor([len(group.samples) for group in groups]))

    def _verify(self, groups: Sequence[Group]) -> None:
        """Raise ConfigError if an estimator with `needs_batch=False` gives other results for the batch than per group.

        A step whose rewards are all equal is inconclusive; the next step is compared, too.
        """
        samples = [sample for group in groups for sample in group.samples]
        alone = [dict(sample.tensors) for sample in samples]
        self._estimate(groups)
        scores = [float(own["token_rewards"].sum()) for own in alone]
        for name in ("advantages", "returns"):
            largest = max(float(np.abs(own[name]).max()) for own in alone)
            tolerance = max(SAME * largest, ROUNDING * max(map(abs, scores)))
            for sample, own in zip(samples, alone, strict=True):
                whole = sample.tensors[name]
                if not np.allclose(whole, own[name], rtol=0, atol=tolerance, equal_nan=True):
                    token = int(np.argmax(np.abs(whole - own[name])))
                    key = f"algorithm.adv_estimator={self.config.algorithm.adv_estimator}"
                    raise ConfigError([
                        f"{key}: declares needs_batch=False, but {name} of sample {sample.id}, token {token}, are "
                        f"{own[name][token]:g} from its group and {whole[token]:g} from the whole batch; remove "
                        "needs_batch=False, or compare only rows of the same group"
                    ])  # fmt: skip
        for sample, own in zip(samples, alone, strict=True):
            sample.tensors.update(own)
        self._unverified = self.traits.needs_rewards and len(set(scores)) == 1

    def complete(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compute everything that depends on all groups, and update the KL coefficient; return metrics."""
        samples = [sample for group in groups for sample in group.samples]
        first = self.normaliser.lacks_statistics
        metrics = self.normaliser.update([sample.reward for sample in samples])
        if first:  # no training has started, so the first step is normalised with its own statistics
            self.prepare(groups)
        if self.traits.needs_batch:
            self._estimate(groups)
        elif self._unverified:
            self._verify(groups)
        mask, over = _mask(samples), self.traits.whitens
        if over:
            white = whiten(_matrix(samples, "advantages"), mask, by_response=over == "responses")
            _spread(samples, mask, advantages=white)
        if self._selects_tokens:
            self._select(samples)
        if self.config.actor.use_kl_loss:
            coefficient = self._kl_coefficients(samples, self.config.actor.kl_loss_coef)
            metrics = metrics | {"actor/kl_coef": float(coefficient.double().mean())}
        if self.traits.needs_reference:
            policy, reference = (_matrix(samples, name)[mask].double() for name in POLICIES)
            metrics["actor/teacher_kl"] = float((policy - reference).mean())
        if not self.config.algorithm.use_kl_in_reward:
            return metrics
        kl, coefficient = self._kl(samples, mask).sum(-1), self._kl_coefficients(samples, self.kl.value)
        per_token = float((kl / mask.sum(-1)).mean())
        self.kl.update(per_token, len(samples))
        return metrics | {
            "actor/reward_kl_penalty": per_token,
            "actor/reward_kl_penalty_coeff": float(coefficient.double().mean()),
        }

    @property
    def _selects_tokens(self) -> bool:
        return self.config.actor.loss_mode in SELECTING

    def _select(self, samples: Sequence[Sample]) -> None:
        """Fill `selected`: 1 on the tokens that the loss treats differently, else 0. Only tokens in the loss count."""
        masks = [sample.loss_mask for sample in samples]
        engine, advantages = [sample.response.log_probs for sample in samples], _named(samples, "advantages")
        covariance = covariances(flattened(engine, masks), flattened(advantages, masks))
        lengths, seeds = [int(mask.sum()) for mask in masks], [sample.seed for sample in samples]
        selected = select_tokens(self.config.actor, covariance, seeds, lengths)
        for sample, values in zip(samples, per_row(selected, masks), strict=True):
            sample.tensors["selected"] = values

    def _token_rewards(self, samples: Sequence[Sample], mask: torch.Tensor) -> torch.Tensor:
        """Return rewards plus DAPO's length penalty by token, float32 [B, T]; the penalty is also logged as a part.

        The last token of a response gets what does not belong to single tokens, or belongs to a token that the model
        did not generate. Without a reward, which only estimators that ignore it allow, all are 0.
        """
        if not self.config.uses_rewards:
            return torch.zeros(mask.shape)
        values = [self.normaliser.value(sample.reward, self.weights) for sample in samples]
        totals = np.array(values) + self._penalties(samples)
        if all(sample.reward.token_rewards is None for sample in samples):
            return place_at_end(torch.from_numpy(totals).float(), mask)
        masks = [sample.response.mask for sample in samples]
        process = [
            np.zeros(len(own)) if sample.reward.token_rewards is None else np.array(sample.reward.token_rewards) * own
            for sample, own in zip(samples, masks, strict=True)
        ]
        rest = totals - np.array([math.fsum(each) for each in process])
        return place_at_end(torch.from_numpy(rest).float(), mask) + _pad(process, samples)

    def _penalties(self, samples: Sequence[Sample]) -> np.ndarray:
        buffer = self.config.reward.overlong_buffer
        penalties = overlong_penalty(
            [sample.response.length for sample in samples],
            self.config.data.max_response_length,
            buffer.len,
            buffer.penalty_factor,
        )
        for sample, penalty in zip(samples, penalties, strict=True):
            if buffer.len:
                sample.reward.parts["overlong_penalty"] = float(penalty)
        return penalties

    def _dimensions(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([B, K], weights [K]), float32: reward functions' values (NaN if not applicable), length penalty."""
        dimensions = [self.normaliser.dimensions(sample.reward) for sample in samples]
        columns = [[each.get(name, math.nan) for each in dimensions] for name in self.weights]
        weights = list(self.weights.values())
        if self.config.reward.overlong_buffer.len:
            columns, weights = [*columns, self._penalties(samples).tolist()], [*weights, 1.0]
        return torch.tensor(columns, dtype=torch.float32).T, torch.tensor(weights, dtype=torch.float32)

    @property
    def _kl_loss_by_source(self) -> bool:
        return self.config.actor.use_kl_loss and bool(self.config.algorithm.kl_coef_by_source)

    def _kl_coefficients(self, samples: Sequence[Sample], otherwise: float) -> torch.Tensor:
        """Return the KL coefficient of each sample, float32 [B, 1]."""
        by_source = self.config.algorithm.kl_coef_by_source
        found = [kl_coefficient(sample.prompt.data_source, by_source, otherwise) for sample in samples]
        return torch.tensor(found, dtype=torch.float32)[:, None]

    def _correct(self, samples: Sequence[Sample], mask: torch.Tensor) -> None:
        """Fill `is_weights`, the factors of the policy loss for the rollout mismatch, if configured."""
        correction = self.config.algorithm.rollout_correction
        if correction.is_enabled and self.config.algorithm.old_log_probs == "trainer":
            engine = _pad([sample.response.log_probs for sample in samples], samples)
            weights = correction_weights(correction, _matrix(samples, "old_log_probs"), engine, mask)
            _spread(samples, mask, is_weights=weights)

    def mismatch(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the mismatch metrics of engine and trainer log-probs on the sampled tokens.

        Covers the samples that the trainer scored: not those whose only pass, their update, was skipped.
        """
        samples = [s for group in groups for s in group.samples if "old_log_probs" in s.tensors]
        if self.config.algorithm.old_log_probs == "engine" or not samples:
            return {}
        masks = [sample.response.mask for sample in samples]
        engine, trainer = [sample.response.log_probs for sample in samples], _named(samples, "old_log_probs")
        metrics = mismatch_metrics(flattened(engine, masks), flattened(trainer, masks))
        correction = self.config.algorithm.rollout_correction
        if correction.is_enabled:
            weights = flattened(_named(samples, "is_weights"), masks)
            if correction.rollout_is is not None:
                metrics["rollout_corr/rollout_is_mean"] = float(weights.mean())
            metrics["rollout_corr/rollout_rs_masked_fraction"] = float((weights == 0).mean())
        return metrics

    def _kl(self, samples: Sequence[Sample], mask: torch.Tensor) -> torch.Tensor:
        """Return the KL estimate of policy and reference, [B, T]; 0 on masked tokens."""
        policy, reference = (_matrix(samples, name) for name in POLICIES)
        algorithm = self.config.algorithm
        return kl_estimate(policy, reference, algorithm.kl_penalty, kwargs=algorithm.kl_penalty_kwargs) * mask


def _mask(samples: Sequence[Sample]) -> torch.Tensor:
    """Return the mask of trainable tokens, bool [B, T]."""
    masks = [sample.response.mask for sample in samples]
    return torch.from_numpy(padded(masks, masks, bool))


def _pad(arrays: Sequence[np.ndarray], samples: Sequence[Sample]) -> torch.Tensor:
    return torch.from_numpy(padded(arrays, [sample.response.mask for sample in samples]))


def _named(samples: Sequence[Sample], name: str) -> list[np.ndarray]:
    return [sample.tensors[name] for sample in samples]


def _matrix(samples: Sequence[Sample], name: str) -> torch.Tensor:
    return _pad(_named(samples, name), samples)


def _spread(samples: Sequence[Sample], mask: torch.Tensor, **matrices: torch.Tensor) -> None:
    """Write the rows of [B, T] matrices to the samples, without padding."""
    masks = [sample.response.mask for sample in samples]
    for name, matrix in matrices.items():
        for sample, values in zip(samples, per_row(matrix[mask].numpy(), masks), strict=True):
            sample.tensors[name] = values
