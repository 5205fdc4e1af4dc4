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
from rlfuse.fusion.sharing import admit, ahead, gradients, passes, paused, rewards, steps, switch_idle_slots_to_trainer


@fusion_policy()
def serial(view: Snapshot) -> list[Decision]:
    """One stage at a time over the whole batch (or, with credits, over as much as they allow)."""
    if (view.waiting and not paused(view)) or view.in_flight:
        return admit(view) if not view.busy else []
    if view.busy or view.scoring:
        return []
    view = in_order(view)
    return rewards(view) or switch_idle_slots_to_trainer(view) or passes(view) or learn(view) or ahead(view)


def in_order(view: Snapshot) -> Snapshot:
    """The same, samples and slots by name: who happened to finish first then changes no sum's last bit."""

    def sort(parts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        return {key: dict(sorted(names.items())) for key, names in parts.items()}

    return replace(view, unscored=sort(view.unscored), ready=sort(view.ready), free=sorted(view.free))


@fusion_policy()
def stream(view: Snapshot) -> list[Decision]:
    """Rewards at once; passes on slots that ran empty; then training."""
    placed = admit(view)
    return (
        placed
        + rewards(view)
        + switch_idle_slots_to_trainer(view)
        + (passes(view, placed) or learn(view) or ahead(view, placed))
    )


@fusion_policy(tuned=("threshold", "stretch"))
def rlhfuse(view: Snapshot) -> list[Decision]:
    """`stream`, with one consolidation of the tail."""
    return consolidate(view) + stream(view)


def learn(view: Snapshot) -> list[Decision]:
    """Training as a stage of its own: when every sample has all its scores."""
    if view.unfinished or view.busy or view.scoring or any(view.unscored.values()):
        return []
    return gradients(view) or steps(view)


_BUILT_IN = {each.__name__: each for each in REGISTERED if each.__module__ in (__name__, adaptive.__module__)}
POLICIES: dict[str, Policy] = {name: _BUILT_IN[name] for name in sorted(_BUILT_IN, key=CHOICES["fusion.policy"].index)}
"""Those that are registered here and in `adaptive`, in the order in which people are told of them."""
