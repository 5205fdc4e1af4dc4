"""Check the scalars of a step against the thresholds of the config group `alerts`. Pure.

An alert that persists is raised once, and again only after it has cleared. A missing metric raises an alert, too.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlfuse.algorithms.corrections import LOG_PROBS_DIFF_MAX, Bound, mismatch_bound
from rlfuse.algorithms.zero_advantage import SKIPPED_SHARE
from rlfuse.config.trainer import AlertsConfig
from rlfuse.fusion.selection import CARRY_OVER
from rlfuse.observe.idle import CAUSES
from rlfuse.observe.offline_metrics import LOSSES

SCORE, PPO_KL, ZERO_SPREAD = "critic/score/mean", "actor/ppo_kl", "reward/frac_reward_zero_std"
ENTROPY = ("response/entropy", "actor/entropy")
REFERENCE_KL = ("actor/reward_kl_penalty", "actor/kl_loss")
GRADIENTS = ("actor/grad_norm", "critic/grad_norm", "reward_model/grad_norm")
METRICS = {
    "reward_drop": (SCORE,),
    "entropy_share": ENTROPY,
    "ppo_kl": (PPO_KL,),
    "kl": REFERENCE_KL,
    "grad_norm_factor": GRADIENTS,
    "zero_spread": (ZERO_SPREAD,),
    "log_probs_diff": (LOG_PROBS_DIFF_MAX,),
}
"""Threshold -> metrics, at least one of which is needed to check it."""
EXPECTED_IDLE = ("idle/start_up", "idle/drained")
WINDOW = 5
"""Steps over which reward, entropy, `frac_reward_zero_std` and idle time are averaged."""
GRAD_NORM_WINDOW = 20
"""Steps whose median gradient norm is the reference for a spike."""
MIN_GRAD_NORMS = 5


def bound_in_steps(
    dtype: str,
    top_p: float,
    top_k: int,
    data: str,
    min_p: float = 0.0,
    quantization: str | None = None,
    old_log_probs: str = "trainer",
) -> Bound:
    """Return the log-prob difference that rounding explains; infinity if engine log-probs are not comparable."""
    comparable = (top_p, top_k, min_p, old_log_probs) == (1, -1, 0, "trainer") and data not in CARRY_OVER
    return mismatch_bound(dtype, quantization) if comparable else Bound(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Alert:
    """Message for a person."""

    title: str
    text: str


class Alerts:
    """Thresholds, and the recent values that they need. `group_size`: samples per prompt; `grad_clip`: 0 for none."""

    def __init__(self, config: AlertsConfig, group_size: int, bound: Bound, grad_clip: float):
        self.config, self._group_size, self._bound, self._grad_clip = config, group_size, bound, grad_clip
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._norms: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=GRAD_NORM_WINDOW))
        self._best = self._first_entropy = math.nan
        self._scores = (math.inf, -math.inf)
        self._missing: dict[str, int] = defaultdict(int)
        self._standing: set[str] = set()

    def restore(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Restore the state after the steps before a resume, without raising their alerts again."""
        for row in rows:
            self.check(row)

    def check(self, values: Mapping[str, float]) -> list[Alert]:
        found = list(self._found(values))
        new = [alert for alert in found if alert.title not in self._standing]
        self._standing = {alert.title for alert in found}
        return new

    def _found(self, values: Mapping[str, float]) -> Iterator[Alert]:
        learning = (self._not_finite, self._reward, self._entropy, self._kl, self._gradients, self._mismatch)
        for check in (*learning, self._reward_signal, self._idle, self._not_checked):
            yield from check(values)

    def _not_checked(self, values: Mapping[str, float]) -> Iterator[Alert]:
        if any(name in values for name in LOSSES):  # steps of offline tasks have no samples
            return
        all_skipped = values.get(SKIPPED_SHARE) == 1
        critic_alone = GRADIENTS[1] in values and GRADIENTS[0] not in values  # trainer.critic_warmup
        ignored = {
            "zero_spread": self._group_size == 1,
            "log_probs_diff": math.isinf(self._bound.most) or all_skipped,
            "ppo_kl": critic_alone or all_skipped,
            "kl": critic_alone,
        }
        for key, names in METRICS.items():
            limit, known = getattr(self.config, key), any(math.isfinite(values.get(name, math.nan)) for name in names)
            self._missing[key] = 0 if known or ignored.get(key) else self._missing[key] + 1
            if limit is not None and self._missing[key] >= WINDOW:
                yield Alert(
                    f"not checked: {key}",
                    f"{' or '.join(names)} is missing or not finite in the last {WINDOW} steps, so "
                    f"alerts.{key}={limit} cannot be checked; check these steps in metrics.jsonl, or set "
                    f"alerts.{key}=null",
                )

    def _mean(self, name: str, values: Mapping[str, float]) -> float:
        """Return the mean over the window; NaN until it is full."""
        recent = self._recent[name]
        if math.isfinite(value := values.get(name, math.nan)):
            recent.append(value)
        return sum(recent) / len(recent) if len(recent) == WINDOW else math.nan

    def _not_finite(self, values: Mapping[str, float]) -> Iterator[Alert]:
        broken = [
            name
            for name in ("actor/pg_loss", "critic/vf_loss", *LOSSES, *GRADIENTS)
            if not math.isfinite(values.get(name, 0))
        ]
        if broken:
            shown = ", ".join(f"{name}={values[name]}" for name in broken)
            yield Alert(
                "not finite",
                f"{shown}: the update was skipped, the weights are unchanged (see fault/*_steps_skipped); if this "
                "recurs, lower the learning rate or actor.grad_clip, or check the samples",
            )

    def _reward(self, values: Mapping[str, float]) -> Iterator[Alert]:
        low, high = (values.get(f"critic/score/{end}", math.nan) for end in ("min", "max"))
        self._scores = (min(self._scores[0], low), max(self._scores[1], high)) if low <= high else self._scores
        mean, limit, span = self._mean(SCORE, values), self.config.reward_drop, self._scores[1] - self._scores[0]
        if limit is not None and span > 0 and self._best - mean > limit * span:
            yield Alert(
                "reward collapse",
                f"mean reward over {WINDOW} steps is {mean:.3g}, after a best of {self._best:.3g}: the drop exceeds "
                f"alerts.reward_drop={limit} of the reward range; check samples.jsonl, lower "
                "actor.optim.lr, or resume from an earlier checkpoint",
            )
        if math.isfinite(mean):
            self._best = max(mean, self._best if math.isfinite(self._best) else mean)

    def _entropy(self, values: Mapping[str, float]) -> Iterator[Alert]:
        name = next((name for name in ENTROPY if name in values), ENTROPY[0])
        mean, limit = self._mean(name, values), self.config.entropy_share
        if not math.isfinite(self._first_entropy):
            self._first_entropy = mean
        elif limit is not None and mean < limit * self._first_entropy:
            yield Alert(
                "entropy collapse",
                f"mean entropy over {WINDOW} steps is {mean:.3g}, {self._first_entropy:.3g} at the start: below "
                f"alerts.entropy_share={limit} of that; raise actor.entropy_coeff or actor.clip_ratio_high, or lower "
                "the learning rate",
            )

    def _kl(self, values: Mapping[str, float]) -> Iterator[Alert]:
        limits = [(PPO_KL, "ppo_kl", "the policy changes too much per step: lower actor.optim.lr or actor.ppo_epochs")]
        remedy = "the policy is far from the reference: raise the KL coefficient"
        limits += [(name, "kl", remedy) for name in REFERENCE_KL]
        for name, key, remedy in limits:
            limit, value = getattr(self.config, key), values.get(name, math.nan)
            if limit is not None and value > limit:
                yield Alert(f"KL: {name}", f"{name}={value:.3g} is above alerts.{key}={limit}; {remedy}")

    def _gradients(self, values: Mapping[str, float]) -> Iterator[Alert]:
        for name in GRADIENTS:
            value, norms, limit = values.get(name, math.nan), self._norms[name], self.config.grad_norm_factor
            if not math.isfinite(value):
                continue
            usual = float(np.median(norms)) if len(norms) >= MIN_GRAD_NORMS else math.nan
            if limit is not None and value > limit * usual and value > self._grad_clip:
                yield Alert(
                    f"gradient spike: {name}",
                    f"{name}={value:.3g}, median {usual:.3g}: above alerts.grad_norm_factor={limit} times the median "
                    f"and actor.grad_clip={self._grad_clip:g}; if this recurs, lower the learning rate or "
                    "actor.grad_clip",
                )
            norms.append(value)

    def _mismatch(self, values: Mapping[str, float]) -> Iterator[Alert]:
        factor, difference = self.config.log_probs_diff, values.get(LOG_PROBS_DIFF_MAX, 0.0)
        if factor is not None and not difference <= factor * self._bound.most:
            yield Alert(
                "engine and trainer disagree",
                f"{LOG_PROBS_DIFF_MAX}={difference:.3g} is above alerts.log_probs_diff={factor} times "
                f"{self._bound.most:g}, the most that rounding explains; check whether it grows, and correct for it "
                "with algorithm.rollout_correction.rollout_is=token",
            )

    def _reward_signal(self, values: Mapping[str, float]) -> Iterator[Alert]:
        mean, limit = self._mean(ZERO_SPREAD, values), self.config.zero_spread
        if limit is not None and self._group_size > 1 and mean > limit:
            yield Alert(
                "zero spread",
                f"{mean:.0%} of the groups had equal rewards in the last {WINDOW} steps: above "
                f"alerts.zero_spread={limit}, such groups give no gradient; use harder prompts, raise rollout.n, "
                "or replace such groups with algorithm.filter_groups.enable=true",
            )
        failed, limit = values.get("reward/failure_rate", 0.0), self.config.reward_failures
        if limit is not None and failed > limit:
            yield Alert(
                "reward failures",
                f"{failed:.1%} of the samples have no reward: above alerts.reward_failures={limit} (the run stops at "
                "reward.max_failure_rate); the first traceback is above",
            )

    def _idle(self, values: Mapping[str, float]) -> Iterator[Alert]:
        idle = {name: value for name, value in values.items() if name.startswith("idle/")}
        waits = {name: value for name, value in idle.items() if name not in EXPECTED_IDLE}
        total = sum(waits.values()) + sum(value for name, value in values.items() if name.startswith("busy/"))
        limit, share = self.config.idle_share, sum(waits.values()) / total if total else math.nan
        mean = self._mean("idle", {"idle": share})
        if limit is not None and mean > limit:
            most = max(waits, key=waits.__getitem__)
            cause = CAUSES.get(most.removeprefix("idle/"), most)
            yield Alert(
                "idle slots",
                f"slots were idle for {mean:.0%} of the last {WINDOW} steps: above alerts.idle_share="
                f"{limit}; main cause: {cause} ({most}={waits[most]:.3g} s per slot in this step)",
            )
