"""Per-token KL estimators (k1, k2, k3) between policy and reference, and the KL coefficient controller.

The controller process applies the penalty to rewards and updates the coefficient; trainer ranks add an estimate to the
loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from rlfuse.algorithms.registry import NO_KWARGS, Registry

KL_KINDS = Registry("algorithm.kl_penalty")


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: str, key: str | None = None, kwargs: Mapping[str, Any] = NO_KWARGS
) -> Tensor:
    """Estimate KL(policy || reference) in nats per token, from tokens sampled by the policy; the shape is kept.

    Estimators of Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html); r = reference/policy:
    k1 (kl) = -log r, unbiased, any sign; abs = |log r|; k2 (mse) = (log r)^2 / 2, biased, low variance;
    k3 (low_var_kl) = r - 1 - log r, unbiased, non-negative. k3 clamps log r to +-20 and its result to +-10, so that one
    token cannot overflow a batch.
    Gradients, if used as a *loss* on the policy's samples: k2 has the gradient of the KL, the gradient of k1 has
    expectation zero, that of k3 belongs to the reverse KL. Use k1 in rewards only.
    `key`: the configuration key for messages; `kwargs`: additional arguments of a custom function.
    """
    found = KL_KINDS.call(kind, {"log_probs": log_probs, "ref_log_probs": ref_log_probs}, kwargs, key)
    return KL_KINDS.check_result(kind, found, log_probs, key)


@KL_KINDS.built_in("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return -log r."""
    return -(ref_log_probs - log_probs)


@KL_KINDS.built_in("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return |log r|."""
    return (ref_log_probs - log_probs).abs()


@KL_KINDS.built_in("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return (log r)^2 / 2."""
    return 0.5 * (ref_log_probs - log_probs).square()


@KL_KINDS.built_in("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return r - 1 - log r, clamped."""
    log_ratio = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (torch.expm1(log_ratio) - log_ratio).clamp(-10.0, 10.0)


def kl_coefficient(source: str, by_source: Mapping[str, float], otherwise: float) -> float:
    """Return the KL coefficient of the first name or pattern that matches the data_source, else `otherwise`.

    Seed1.5-VL (2025, arXiv 2505.07062) uses 1e-5 for general prompts and 0 for verifiable ones.
    """
    return next((value for pattern, value in by_source.items() if fnmatchcase(source, pattern)), otherwise)


class AdaptiveKl:
    """Coefficient of the KL penalty: fixed, or adaptive with a target KL (Ziegler et al. 2019, arXiv 1909.08593).

    With a target, `update` multiplies `value` by 1 + error * n / horizon, where error = KL / target - 1, clipped to
    +-0.2. The KL is per token (mean over a response's tokens, then over responses), in nats; n and horizon count
    samples. `config.checks` requires horizon > 0.2 * n; below it one step could turn the coefficient negative.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value = self._start = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """Adapt the coefficient to `n` samples with a mean KL per token of `kl`; no-op without a target."""
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(
                f"The KL to the reference is {kl}, so the KL coefficient cannot be adapted: check the log-probs."
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the checkpoint state; target and horizon come from the configuration."""
        return {"value": self.value, "start": self._start}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adapted coefficient, unless the configured start value has changed."""
        if self.target is not None and state.get("start", self._start) == self._start:
            self.value = float(state["value"])
