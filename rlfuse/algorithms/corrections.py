"""Mismatch of token log-probs between rollout engine and trainer: metrics, tolerances, weights of the policy loss.

Pure functions. Log-probs are in nats, of the same sampled tokens under the same weight version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlfuse.algorithms.losses import mask_response
from rlfuse.config.schema import RolloutCorrection

LOG_PROBS_DIFF_MEAN, LOG_PROBS_DIFF_MAX = (f"training/rollout_log_probs_diff_{kind}" for kind in ("mean", "max"))


@dataclass(frozen=True, slots=True)
class Bound:
    """Tolerated difference of log-probs of the same tokens, in nats, between engine and trainer."""

    mean: float
    most: float

    def is_exceeded_by(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a measured difference exceeds the bound or is NaN; missing metrics do not count."""
        limits = ((LOG_PROBS_DIFF_MEAN, self.mean), (LOG_PROBS_DIFF_MAX, self.most))
        return not all(metrics.get(name, 0.0) <= limit for name, limit in limits)


BOUNDS = {"float32": Bound(1e-3, 1e-3), "bfloat16": Bound(2**-4, 2.0)}
"""By `model.dtype`. bfloat16: 8 and 256 times `torch.finfo.eps`, since rounding accumulates over layers and single
tokens may be routed to other experts. float32: rounding is far smaller, the bound covers summation orders and TF32."""
QUANTIZED_FACTOR = 8
"""Factor on the bounds for 8-bit rollout. FP8 rounds weights 16 times as coarsely as bfloat16
(`torch.finfo(float8_e4m3fn).eps`), but independently and in linear layers only. Mean difference of a small random
model: 0.02 with 16 bits, 0.25 with 8."""


def mismatch_bound(dtype: str, quantization: str | None) -> Bound:
    """Return the difference that rounding explains, for this model.dtype and rollout.quantization."""
    bound, times = BOUNDS[dtype], QUANTIZED_FACTOR if quantization else 1
    return Bound(times * bound.mean, times * bound.most)


def correction_weights(
    settings: RolloutCorrection, trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor
) -> Tensor:
    """Return the factor of each token's policy loss, [B, T], detached: importance weight times 0 where rejected.

    All tensors are [B, T]; a row depends on its own tokens only. Rejected tokens still count in the loss divisor, and
    keep KL loss and entropy bonus; verl removes them from all three.
    """
    log_ratio = mask_response((trainer_log_probs - engine_log_probs).detach(), mask)
    weights = torch.ones_like(log_ratio)
    if settings.rollout_is is not None:
        weights = _importance_weights(settings, log_ratio)
    if settings.rollout_rs is not None:
        weights = weights * _accepted(settings, log_ratio, mask)
    return mask_response(weights, mask)


def _importance_weights(settings: RolloutCorrection, log_ratio: Tensor) -> Tensor:
    """Return trainer probability / engine probability, bounded, per token or per response (rollout_is), [B, T].

    Truncated importance sampling for the rollout mismatch: "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (Yao et al. 2025, fengyao.notion.site/off-policy-rl); truncation: Ionides 2008. With a lower bound the
    weight is 0 out of bounds instead (IcePop; Ling Team 2025, arXiv 2510.18855).
    """
    if settings.rollout_is == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(-20.0, 20.0).exp()
    lower, upper = settings.rollout_is_threshold_lower, settings.rollout_is_threshold
    if lower is None:
        return weights.clamp(max=upper)
    return torch.where((lower <= weights) & (weights <= upper), weights, 0.0)


def _accepted(settings: RolloutCorrection, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return whether a token's or response's KL estimate (rollout_rs) is within bounds, bool [B, T] or [B, 1].

    Masked importance sampling: "When Speed Kills Stability" (Liu et al. 2025, richardli.xyz/rl-collapse).
    Estimators as in verl: k1 = -log-ratio, k2 = log-ratio^2 / 2, k3 = ratio - 1 - log-ratio.
    """
    assert settings.rollout_rs is not None and settings.rollout_rs_threshold is not None
    level, _, kind = settings.rollout_rs.rpartition("_")
    upper, lower = settings.rollout_rs_threshold, settings.rollout_rs_threshold_lower
    log_ratio = log_ratio.clamp(-20.0, 20.0)
    estimate = {"k1": -log_ratio, "k2": log_ratio.square() / 2, "k3": log_ratio.exp() - 1 - log_ratio}[kind]
    if level == "seq_max":
        estimate = estimate.amax(-1, keepdim=True)  # k2 and k3 are 0 at masked-out positions, and never negative
    elif level != "token":
        estimate = estimate.sum(-1, keepdim=True)
    if level == "seq_mean":
        estimate = estimate / mask.sum(-1, keepdim=True).clamp(min=1)
    if kind != "k1":
        return estimate <= upper
    return (math.log(1 / upper if lower is None else lower) <= estimate) & (estimate <= math.log(upper))


def mismatch_metrics(
    engine_log_probs: np.ndarray | Sequence[float], trainer_log_probs: np.ndarray | Sequence[float]
) -> dict[str, float]:
    """Compare the engine's and the trainer's probabilities of the sampled tokens; both arrays are flat [tokens].

    `diff` is the absolute difference of probabilities (of log-probs for `log_probs` metrics), std with n - 1. Undefined
    statistics (std of one token, correlation of a constant) are NaN.
    """
    engine = np.asarray(engine_log_probs, dtype=np.float64)
    trainer = np.asarray(trainer_log_probs, dtype=np.float64)
    if engine.ndim != 1 or engine.shape != trainer.shape or engine.size == 0:
        raise ValueError(
            f"Mismatch metrics need two flat, equally long, non-empty arrays; got engine {engine.shape} and trainer "
            f"{trainer.shape}: concatenate the response tokens of both in the same order."
        )
    engine_probs, trainer_probs = np.exp(engine), np.exp(trainer)
    diff = np.abs(engine_probs - trainer_probs)
    return {
        "training/rollout_probs_diff_mean": float(diff.mean()),
        "training/rollout_probs_diff_max": float(diff.max()),
        "training/rollout_probs_diff_std": float(diff.std(ddof=1)) if diff.size > 1 else math.nan,
        "training/rollout_actor_probs_pearson_corr": _pearson(engine_probs, trainer_probs),
        LOG_PROBS_DIFF_MEAN: float(np.abs(engine - trainer).mean()),
        LOG_PROBS_DIFF_MAX: float(np.abs(engine - trainer).max()),
    }


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / math.sqrt((x @ x) * (y @ y)))
