"""Mismatch of token log-probs between rollout engine and trainer: metrics, tolerances, truncated importance sampling.

Pure functions. Log-probs are in nats, of the same sampled tokens under the same weight version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rlfuse.algorithms.losses import mask_response

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


def truncated_importance_weights(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """Return min(trainer probability / engine probability, cap) per token, [B, T], detached; 0 where `mask` is 0.

    All tensors are [B, T]. Truncated importance sampling for the rollout mismatch: "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (Yao et al. 2025, fengyao.notion.site); truncation: Ionides 2008.
    """
    log_weights = (trainer_log_probs - engine_log_probs).detach().clamp(-20.0, 20.0)
    return mask_response(log_weights.exp().clamp(max=cap), mask)


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
