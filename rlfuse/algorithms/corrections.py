"""The engine samples with slightly other probabilities than the trainer computes: measure it, and correct for it.

Role: the controller logs the mismatch of every step; the policy loss multiplies by the weights when they are on.
Pure functions; log-probs in nats, of the same sampled tokens under the same weight version.
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
    """How far log-probs of the same tokens may be apart, in nats, for engine and trainer to compute the same model."""

    mean: float
    most: float

    def is_exceeded_by(self, metrics: Mapping[str, float]) -> bool:
        """Whether these are further apart; also where one of them is no number. Not where nothing was measured."""
        limits = ((LOG_PROBS_DIFF_MEAN, self.mean), (LOG_PROBS_DIFF_MAX, self.most))
        return not all(metrics.get(name, 0.0) <= limit for name, limit in limits)


BOUNDS = {"float32": Bound(1e-3, 1e-3), "bfloat16": Bound(2**-4, 2.0)}
"""By `model.dtype`. bfloat16: 8 and 256 times the distance from 1 to the next number (`torch.finfo.eps`), as rounding
adds up over layers and single tokens may be routed to other experts. float32, whose own rounding is far smaller, has
room for sums in other orders and TF32."""
QUANTIZED_FACTOR = 8
"""How many times as far engines of 8 bits may be from the trainer. They round weights 16 times as coarsely as bfloat16
does (`torch.finfo(float8_e4m3fn).eps`), but each by itself, in linear layers alone. A small random model was 0.02 apart
with 16 bits and 0.25 with 8, in the mean."""


def mismatch_bound(dtype: str, quantization: str | None) -> Bound:
    """What rounding explains, of model.dtype and rollout.quantization."""
    bound, times = BOUNDS[dtype], QUANTIZED_FACTOR if quantization else 1
    return Bound(times * bound.mean, times * bound.most)


def truncated_importance_weights(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """min(trainer probability / engine probability, cap) per token, [B, T], without gradient; 0 where `mask` is 0.

    All arguments [B, T]. "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025,
    fengyao.notion.site); truncation of importance weights is from Ionides 2008. Without a mismatch every weight is 1.
    """
    log_weights = (trainer_log_probs - engine_log_probs).detach().clamp(-20.0, 20.0)
    return mask_response(log_weights.exp().clamp(max=cap), mask)


def mismatch_metrics(
    engine_log_probs: np.ndarray | Sequence[float], trainer_log_probs: np.ndarray | Sequence[float]
) -> dict[str, float]:
    """How far the engine's probabilities of the sampled tokens are from the trainer's; both flat [tokens].

    `diff` is the absolute difference of probabilities (of log-probs where the name says so), std with n - 1. A figure
    that does not exist (std of one token, correlation of a constant) is NaN, not 0.
    """
    engine = np.asarray(engine_log_probs, dtype=np.float64)
    trainer = np.asarray(trainer_log_probs, dtype=np.float64)
    if engine.ndim != 1 or engine.shape != trainer.shape or engine.size == 0:
        raise ValueError(
            f"Mismatch needs two flat, equally long, non-empty arrays; received engine {engine.shape} and trainer "
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
