"""Decide when offloaded optimizer states start their way back to the device (`actor.optimizer_residency=forecast`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from rlfuse.fusion.decisions import PASS_BEFORE_STEP, Snapshot
from rlfuse.fusion.mini_batches import MiniBatchProgress

MARGIN = 1.5  # copies that others' work runs beside take so many times as long as those that nothing ran beside
LOOK_S = 0.5  # from one look at the forecast to the next, at the most, and for a call to arrive


def due(away: Mapping[int, float], seconds: float) -> list[int]:
    """Slots whose optimizers have to set out now; `away`: slot -> seconds they take, `seconds`: to the first step."""
    return [slot for slot, takes in away.items() if MARGIN * takes + LOOK_S >= seconds]


def seconds_to_step(view: Snapshot, models: Iterable[MiniBatchProgress]) -> float:
    """Until one of these models' next optimizer step at the earliest; infinite where none comes."""
    left = [progress.left_tokens for progress in models if not progress.done]
    if not left:
        return inf
    later = [parts for kind, parts in view.deferred.items() if kind not in PASS_BEFORE_STEP.values()]
    scored = view.to_score - sum(tokens for parts in later for part in parts.values() for tokens in part.values())
    work = max(0.0, scored) / view.costs.score_tokens_per_s + min(left) / view.costs.train_tokens_per_s
    return max(view.deadline - view.now if view.unfinished else 0.0, work / max(1.0, view.power))
