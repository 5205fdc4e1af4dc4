"""Objectives of the optimizer steps: the actor's and the critic's loss of one micro-batch.

Pure functions. Losses and diagnostics are unnormalised sums, so they add up over micro-batches and ranks in any split,
before the size of the mini-batch is known; `mean_diagnostics` divides once at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlfuse.algorithms.kl import kl_estimate
from rlfuse.algorithms.losses import loss_sum, policy_loss, value_loss
from rlfuse.config.schema import ActorConfig

# Diagnostics divided by the loss divisor; all others are means over response tokens.
_LOSSES = frozenset({"pg_loss", "kl_loss", "vf_loss"})


def mean_diagnostics(sums: Mapping[str, float], count: float, tokens: int) -> dict[str, float]:
    """Return a mini-batch's mean diagnostics from the sums over its rows; `count`: its `loss_divisor`.

    `tokens`: those in the loss; without any, all sums are 0.
    """
    return {name: total / (count if name in _LOSSES else max(1, tokens)) for name, total in sums.items()}


def actor_objective(
    settings: ActorConfig,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    max_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy loss minus the entropy bonus plus the KL to the reference; all inputs [B, T].

    `tensors` holds `old_log_probs` and `advantages`; `ref_log_probs` with actor.use_kl_loss, and `kl_coefs` if the KL
    coefficient depends on the data source; `is_weights` with algorithm.rollout_correction; `selected` with a loss
    that `covariance` selects tokens for; `loss_mask` with actor.mask_truncated_completions, 0 on tokens to leave out.
    `max_tokens`: data.max_response_length, the constant of
    `seq-mean-token-sum-norm`. Returns the loss and detached diagnostics, all as sums.
    """
    if "loss_mask" in tensors:
        mask = mask * tensors["loss_mask"].to(mask.dtype)

    def total(matrix: torch.Tensor) -> torch.Tensor:
        return loss_sum(matrix, mask, settings.loss_agg_mode, max_tokens)

    matrix, sums = policy_loss(log_probs, mask=mask, **policy_loss_arguments(settings, tensors))
    loss = total(matrix)
    sums |= {"pg_loss": loss.detach(), "entropy": (entropy.detach() * mask).sum()}
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * total(entropy)
    if settings.use_kl_loss:
        kind, kwargs = settings.kl_loss_type, settings.kl_loss_type_kwargs
        kl = kl_estimate(log_probs, tensors["ref_log_probs"], kind, "actor.kl_loss_type", kwargs)
        loss = loss + total(tensors.get("kl_coefs", settings.kl_loss_coef) * kl)
        sums["kl_loss"] = total(kl.detach())
    return loss, sums


def policy_loss_arguments(settings: ActorConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of `policy_loss` besides `log_probs` and `mask`; `tensors` as in `actor_objective`."""
    return {
        "old_log_probs": tensors["old_log_probs"],
        "advantages": tensors["advantages"],
        "clip_low": settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low,
        "clip_high": settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high,
        "clip_c": settings.clip_ratio_c,
        "mode": settings.loss_mode,
        "is_weights": tensors.get("is_weights"),
        "selected": tensors.get("selected"),
        "kwargs": settings.loss_mode_kwargs,
        "tau_pos": settings.tau_pos,
        "tau_neg": settings.tau_neg,
        "ppo_kl_coef": settings.ppo_kl_coef,
    }


def critic_objective(
    clip: float,
    loss_agg_mode: str,
    values: torch.Tensor,
    mask: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    max_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the clipped value loss; `tensors` holds `values` before the update and `returns`, all [B, T].

    Returns the same as `actor_objective`.
    """
    matrix, clipped = value_loss(values, tensors["values"], tensors["returns"], mask, clip)
    loss = loss_sum(matrix, mask, loss_agg_mode, max_tokens)
    sums = {"vf_loss": loss.detach(), "vf_clipfrac": clipped, "vpred_mean": (values.detach() * mask).sum()}
    return loss, sums
