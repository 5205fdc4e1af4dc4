"""What an optimizer step minimises: the actor's and the critic's loss of one micro-batch, put together from config.

Role: called by trainer ranks between forward and backward; pure tensor functions. Every value returned is this
micro-batch's share of the mini-batch's mean: sums times `1 / global count`, so shares simply add up over micro-batches
and ranks, in any split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlfuse.algorithms.kl import kl_estimate
from rlfuse.algorithms.losses import loss_sum, policy_loss, value_loss
from rlfuse.config.schema import ActorConfig


@dataclass(frozen=True, slots=True)
class Scale:
    """What turns sums over micro-batches into means over the mini-batch."""

    loss: float
    """1 / `loss_count` of the whole mini-batch under the loss's aggregation mode."""
    tokens: float
    """1 / response tokens of the whole mini-batch, for diagnostics."""
    max_tokens: int
    """data.max_response_length, the constant of `seq-mean-token-sum-norm`."""


def actor_objective(
    settings: ActorConfig,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    scale: Scale,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss, minus entropy bonus, plus KL to the reference; all inputs [B, T].

    `tensors` holds `old_log_probs` and `advantages`; `ref_log_probs` with actor.use_kl_loss; `is_weights` (truncated
    importance weights) where the engine's mismatch is corrected.
    """

    def mean(matrix: torch.Tensor) -> torch.Tensor:
        return loss_sum(matrix, mask, settings.loss_agg_mode, scale.max_tokens) * scale.loss

    matrix, diagnostics = policy_loss(
        log_probs,
        tensors["old_log_probs"],
        tensors["advantages"],
        mask,
        clip_low=settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low,
        clip_high=settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high,
        clip_c=settings.clip_ratio_c,
        mode=settings.loss_mode,
        is_weights=tensors.get("is_weights"),
    )
    loss = mean(matrix)
    shares = {name: total * scale.tokens for name, total in diagnostics.items()}
    shares["pg_loss"] = loss.detach()
    shares["entropy"] = (entropy.detach() * mask).sum() * scale.tokens
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * mean(entropy)
    if settings.use_kl_loss:
        kl = mean(kl_estimate(log_probs, tensors["ref_log_probs"], settings.kl_loss_type))
        loss = loss + settings.kl_loss_coef * kl
        shares["kl_loss"] = kl.detach()
    return loss, shares


def critic_objective(
    clip: float,
    loss_agg_mode: str,
    values: torch.Tensor,
    mask: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    scale: Scale,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped value loss; `tensors` holds the `values` before the update and the `returns`, all [B, T]."""
    matrix, clipped = value_loss(values, tensors["values"], tensors["returns"], mask, clip)
    loss = loss_sum(matrix, mask, loss_agg_mode, scale.max_tokens) * scale.loss
    shares = {
        "vf_loss": loss.detach(),
        "vf_clipfrac": clipped * scale.tokens,
        "vpred_mean": (values.detach() * mask).sum() * scale.tokens,
    }
    return loss, shares
