"""Learning-rate schedules as in verl: pure functions of the training step and the settings.

The controller passes the factor with every optimizer step, so no scheduler state is saved. All optimizer steps of a
training step (mini-batches, epochs) use the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlfuse.config.schema import Config, OptimConfig


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine,
    "wsd": _cosine,
}
"""Value of `lr_scheduler_type` -> share of the decay that is left at a progress of 0 to 1."""


def lr_factor(optim: OptimConfig, step: int, total: int, waited: int = 0) -> float:
    """Return the share of the full learning rate in training step `step` (from 1) of `total`.

    `waited`: steps before the model's first update, where warm-up starts. Warm-up is linear, from 0 in the first
    update. A decay would reach `min_lr_ratio` in the step after the last; that of wsd covers the last steps only
    (MiniCPM, Hu et al. 2024, arXiv 2404.06395).
    """
    taken, updates = max(0, step - 1 - waited), total - waited
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * total)
    if taken < warmup:
        return taken / warmup
    decay = after_warmup = updates - warmup
    if optim.lr_scheduler_type == "wsd":
        tenth = after_warmup - int(0.9 * after_warmup)
        decay = min(optim.lr_wsd_decay_steps or tenth, after_warmup)
    progress = (taken - (updates - decay)) / max(1, decay)
    share = DECAYS[optim.lr_scheduler_type](min(1.0, max(0.0, progress)))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share


def lr_factors(config: Config, step: int, total: int) -> dict[str, float]:
    """Return `lr_factor` of each model that a run trains."""
    waited = max(0, config.trainer.critic_warmup - 1)
    return {
        "critic": lr_factor(config.critic.optim, step, total),
        "actor": lr_factor(config.actor.optim, step, total, waited),
    }
