"""What an optimizer step minimises: the actor's and the critic's loss of one micro-batch, put together from config.

Role: the objectives are called by trainer ranks between forward and backward, `mean_diagnostics` by the trainer group after the
step; pure functions. Losses and diagnostics are unnormalised sums, so they simply add up over micro-batches and ranks,
in any split and before anyone knows how many rows the mini-batch will have; `mean_diagnostics` divides once, in the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlfuse.algorithms.kl import kl_estimate
from rlfuse.algorithms.losses import loss_sum, policy_loss, value_loss
from rlfuse.config.schema import ActorConfig

# Diagnostics that are divided by the losses' count; all others are means over response tokens.
_LOSSES = frozenset({"pg_loss", "kl_loss", "vf_loss"})


def mean_diagnostics(sums: Mapping[str, float], count: float, tokens: int) -> dict[str, float]:
    """A mini-batch's diagnostics from their sums over all its rows; `count`: its `loss_divisor`."""
    return {name: total / (count if name in _LOSSES else tokens) for name, total in sums.items()}


def actor_objective(
    settings: ActorConfig,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    max_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss, minus entropy bonus, plus KL to the reference; all inputs [B, T].

    `tensors` holds `old_log_probs` and `advantages`; `ref_log_probs` with actor.use_kl_loss, and `kl_coefs` where
    the KL's coefficient differs by source; `is_weights` (truncated importance weights) where the engine's mismatch is
    corrected. `max_tokens`: data.max_response_length, the
    constant of `seq-mean-token-sum-norm`. Returns the loss and detached diagnostics, all summed.
    """

    def total(matrix: torch.Tensor) -> torch.Tensor:
        return loss_sum(matrix, mask, settings.loss_agg_mode, max_tokens)

    matrix, sums = policy_loss(
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
    loss = total(matrix)
    sums |= {"pg_loss": loss.detach(), "entropy": (entropy.detach() * mask).sum()}
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * total(entropy)
    if settings.use_kl_loss:
        kl = kl_estimate(log_probs, tensors["ref_log_probs"], settings.kl_loss_type, "actor.kl_loss_type")
        loss = loss + total(tensors.get("kl_coefs", settings.kl_loss_coef) * kl)
        sums["kl_loss"] = total(kl.detach())
    return loss, sums


def critic_objective(
    clip: float,
    loss_agg_mode: str,
    values: torch.Tensor,
    mask: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    max_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped value loss; `tensors` holds the `values` before the update and the `returns`, all [B, T].

    Returns as `actor_objective`.
    """
    matrix, clipped = value_loss(values, tensors["values"], tensors["returns"], mask, clip)
    loss = loss_sum(matrix, mask, loss_agg_mode, max_tokens)
    sums = {"vf_loss": loss.detach(), "vf_clipfrac": clipped, "vpred_mean": (values.detach() * mask).sum()}
    return loss, sums
