"""Items that are resident on a slot's device in each phase.

With actor.optimizer_residency=step an optimizer is resident only during checkpoints and its own steps. Tests compare
the table with a replay of the real controller's calls (tests/worlds/residency_replay.py).
"""

from __future__ import annotations

from enum import StrEnum

LOADING, GENERATING, TRAINING, SYNC, SAVING = "loading", "generating", "training", "syncing", "saving"
PHASES = (LOADING, GENERATING, TRAINING, SYNC, SAVING)  # in order; a first syncing precedes generation


class Item(StrEnum):
    """Kind of memory on a device."""

    PARAMETERS = "parameters"
    REFERENCE = "reference"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    ENGINE_WEIGHTS = "engine weights"
    KV_CACHE = "KV cache"
    BUCKETS = "buckets"
    LAYER = "engine layer"
    RESIDENTS = "residents"


MODELS = frozenset({Item.PARAMETERS, Item.REFERENCE, Item.OPTIMIZER})
ENGINE = frozenset({Item.ENGINE_WEIGHTS, Item.KV_CACHE})
IN_PHASE = {
    LOADING: MODELS,
    GENERATING: ENGINE,
    TRAINING: MODELS | {Item.GRADIENTS, Item.ACTIVATIONS},
    SYNC: MODELS | {Item.ENGINE_WEIGHTS, Item.BUCKETS, Item.LAYER},
    SAVING: MODELS | {Item.BUCKETS},
}
"""Items in each phase, besides `RESIDENTS`, if engine and ranks alternate."""


def contents(optimizers_alone: bool = False, alternates: bool = True) -> dict[str, frozenset[Item]]:
    """Return the items on a device in each phase.

    `optimizers_alone`: each optimizer is resident only in its steps; `alternates`: engine and ranks alternate on the
    device, otherwise both stay.
    """
    always = {Item.RESIDENTS} if alternates else {Item.RESIDENTS} | MODELS | ENGINE
    found = {phase: items | always for phase, items in IN_PHASE.items()}
    if optimizers_alone:
        for phase in (GENERATING, TRAINING, SYNC):
            found[phase] -= {Item.OPTIMIZER}
    return found
