"""Learning-rate schedules as in verl: pure functions of the training step and the settings.

The controller passes the factor with every optimizer step, so no scheduler state is saved. All optimizer steps of a
training step (mini-batches, epochs) use the same rate.
"""

from __future__ import annotations

import math

from rlfuse.config.schema import Config, OptimConfig


def lr_factor(optim: OptimConfig, step: int, total: int, waited: int = 0) -> float:
    """Return the share of the full learning rate in training step `step` (from 1) of `total`.

    `waited`: steps before the model's first update, where warm-up starts. Warm-up is linear, from 0 in the first
    update. A cosine would reach 0 in the step after the last.
    """
    taken, updates = max(0, step - 1 - waited), total - waited
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * total)
    if taken < warmup:
        return taken / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = (taken - warmup) / max(1, updates - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def lr_factors(config: Config, step: int, total: int) -> dict[str, float]:
    """Return `lr_factor` of each model that a run trains."""
    waited = max(0, config.trainer.critic_warmup - 1)
    optim = config.actor.optim
    return {"critic": lr_factor(optim, step, total), "actor": lr_factor(optim, step, total, waited)}
