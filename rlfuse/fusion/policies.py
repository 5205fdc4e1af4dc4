"""When each piece of work runs: the fusion policies, pure functions of a snapshot.

Role: `fusion=<name>` picks one; the controller calls it whenever something happened. All are exact: they decide when
and where, never what. A user's own are found by `own_policies`.
- `serial`: generation, each kind of scoring, training, one stage after the other, as other systems do;
- `stream`: a slot that has nothing left to generate scores what is finished, while others still generate;
- `rlhfuse`: as `stream`; and when few samples are left, they are consolidated on few slots, once (RLHFuse, NSDI '25);
- `adaptive`: lengths decide who is admitted where, slots are freed whenever that pays, and free ones also accumulate
  the first mini-batch's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlfuse.config.valid_values import CHOICES
from rlfuse.fusion.adaptive import adaptive
from rlfuse.fusion.consolidation import consolidate
from rlfuse.fusion.decisions import Decision, Policy, Snapshot
from rlfuse.fusion.registry import REGISTERED, fusion_policy
from rlfuse.fusion.sharing import (
    accumulate_gradients,
    admission_paused,
    admit,
    prefetch_passes,
    score_passes,
    score_rewards,
    step_optimizer,
    switch_idle_slots_to_trainer,
)


@fusion_policy()
def serial(view: Snapshot) -> list[Decision]:
    """One stage at a time over the whole batch (or, with credits, over as much as they allow)."""
    if (view.waiting and not admission_paused(view)) or view.in_flight:
        return admit(view) if not view.busy else []
    if view.busy or view.scoring:
        return []
    view = sorted_by_name(view)
    scoring = score_rewards(view) or switch_idle_slots_to_trainer(view) or score_passes(view)
    return scoring or train(view) or prefetch_passes(view)


def sorted_by_name(view: Snapshot) -> Snapshot:
    """The same, samples and slots by name: who happened to finish first then changes no sum's last bit."""

    def sort(parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        return {key: dict(sorted(names.items())) for key, names in parts.items()}

    return replace(view, unscored=sort(view.unscored), ready=sort(view.ready), idle_trainers=sorted(view.idle_trainers))


@fusion_policy()
def stream(view: Snapshot) -> list[Decision]:
    """Rewards at once; passes on slots that ran empty; then training."""
    admitted = admit(view)
    return (
        admitted
        + score_rewards(view)
        + switch_idle_slots_to_trainer(view)
        + (score_passes(view, admitted) or train(view) or prefetch_passes(view, admitted))
    )


@fusion_policy(tuned=("threshold", "max_decode_slowdown"))
def rlhfuse(view: Snapshot) -> list[Decision]:
    """`stream`, with one consolidation of the tail."""
    return consolidate(view) + stream(view)


def train(view: Snapshot) -> list[Decision]:
    """Train as a stage of its own: when every sample has all its scores."""
    if view.unfinished or view.busy or view.scoring or any(view.unscored.values()):
        return []
    return accumulate_gradients(view) or step_optimizer(view)


_BUILT_IN = {each.__name__: each for each in REGISTERED if each.__module__ in (__name__, adaptive.__module__)}
POLICIES: dict[str, Policy] = {name: _BUILT_IN[name] for name in sorted(_BUILT_IN, key=CHOICES["fusion.policy"].index)}
"""Those that are registered here and in `adaptive`, in the order in which people are told of them."""
