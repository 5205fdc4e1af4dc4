"""KL between policy and reference: per-token estimates, and the controller of the coefficient.

Role: the controller subtracts the penalty from rewards and steers the coefficient; trainer ranks add an estimate to the
loss. Pure functions of tensors and one small plain-data controller, saved with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from rlfuse.algorithms.registry import Registry, call

KL_KINDS = Registry("algorithm.kl_penalty")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str, key: str | None = None) -> Tensor:
    """Per-token estimate in nats of KL(policy || reference) from tokens that the policy sampled; same shape out.

    From Schulman's note "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html), r = reference / policy:
    k1 (kl) = -log r, unbiased, any sign; abs = |log r|; k2 (mse) = (log r)^2 / 2, biased, low variance;
    k3 (low_var_kl) = r - 1 - log r, unbiased and never negative. k3 clamps log r to +-20 and itself to +-10 so that one
    token cannot overflow a batch.
    As a *loss* the gradients differ from this: on the policy's own samples that of k2 is the KL's, that of k1 has
    expectation zero, that of k3 belongs to the reverse direction. k1 is for rewards.
    """
    found = call(KL_KINDS.find(kind, key), {"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    return KL_KINDS.check_result(kind, found, log_probs, key)


@KL_KINDS.built_in("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """-log r."""
    return -(ref_log_probs - log_probs)


@KL_KINDS.built_in("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log r|."""
    return (ref_log_probs - log_probs).abs()


@KL_KINDS.built_in("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log r)^2 / 2."""
    return 0.5 * (ref_log_probs - log_probs).square()


@KL_KINDS.built_in("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """r - 1 - log r."""
    log_ratio = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (torch.expm1(log_ratio) - log_ratio).clamp(-10.0, 10.0)


def kl_coefficient(source: str, by_source: Mapping[str, float], otherwise: float) -> float:
    """The KL coefficient of a sample by its data_source: of the first name or pattern that fits, else `otherwise`.

    Seed1.5-VL (2025, arXiv 2505.07062) takes 1e-5 for general prompts and 0 for verifiable ones.
    """
    return next((value for pattern, value in by_source.items() if fnmatchcase(source, pattern)), otherwise)


class AdaptiveKl:
    """The coefficient of the KL penalty: fixed, or steered to a target KL (Ziegler et al. 2019, arXiv 1909.08593).

    With a target, `update` multiplies `value` by 1 + error * n / horizon, where error = KL / target - 1, clipped to
    +-0.2. The KL is per token (mean over a response's tokens, then over responses), in nats; n and horizon count
    samples. The horizon is above 0.2 * n, or one step could turn the coefficient negative (`config.checks`).
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value = self._start = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """Account for `n` samples whose mean KL per token was `kl`; nothing happens without a target."""
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(
                f"The KL to the reference is {kl}, so its coefficient cannot be steered: look at the log-probs."
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps; target and horizon come from the configuration."""
        return {"value": self.value, "start": self._start}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a steered coefficient, unless the configuration has another to start at since."""
        if self.target is not None and state.get("start", self._start) == self._start:
            self.value = float(state["value"])
