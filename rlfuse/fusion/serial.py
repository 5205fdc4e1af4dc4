"""The policy without fusion: one stage at a time, generation, then each kind of scoring, then training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlfuse.fusion.assignment import (
    accumulate_gradients,
    admission_paused,
    admit,
    prefetch_passes,
    score_passes,
    score_rewards,
    step_optimizer,
    switch_idle_slots_to_trainer,
)
from rlfuse.fusion.decisions import Decision, Snapshot, fusion_policy


@fusion_policy()
def serial(view: Snapshot) -> list[Decision]:
    """Run one stage at a time over the whole batch (or over as many samples as the credit allows)."""
    if (view.waiting and not admission_paused(view)) or view.in_flight:
        return admit(view) if not view.busy else []
    if view.busy or view.scoring:
        return []
    view = sorted_by_name(view)
    scoring = score_rewards(view) or switch_idle_slots_to_trainer(view) or score_passes(view)
    return scoring or train(view) or prefetch_passes(view)


def sorted_by_name(view: Snapshot) -> Snapshot:
    """Return the view with samples and slots sorted, so that sums do not depend on finishing order."""

    def sort(parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        return {key: dict(sorted(names.items())) for key, names in parts.items()}

    return replace(view, unscored=sort(view.unscored), ready=sort(view.ready), idle_trainers=sorted(view.idle_trainers))


def train(view: Snapshot) -> list[Decision]:
    """Train as a separate stage, once every sample has all its scores."""
    if view.unfinished or view.busy or view.scoring or any(view.unscored.values()):
        return []
    return accumulate_gradients(view) or step_optimizer(view)
