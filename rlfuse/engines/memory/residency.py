"""Which items are on a slot's device in which phase: a ledger of the calls that move something.

`contents` gives `rlfuse plan` the items of each phase; tests replay the calls of the real controller on a
`ResidencyReplay`, which refuses a call whose items are elsewhere. Under actor.optimizer_residency=step an optimizer is
there for checkpoints and in its own steps alone (`step_alone`). Where engine and ranks fit together, nothing moves.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

LOADING, GENERATING, TRAINING, SYNC, SAVING = "loading", "generating", "training", "syncing", "saving"
PHASES = (LOADING, GENERATING, TRAINING, SYNC, SAVING)  # in order; a first syncing precedes generation


class Item(StrEnum):
    """Something that lies on a device."""

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


MODELS = frozenset({Item.PARAMETERS, Item.REFERENCE, Item.OPTIMIZER})  # gradients move with them
TRAINED = MODELS | {Item.GRADIENTS}
ENGINE = frozenset({Item.ENGINE_WEIGHTS, Item.KV_CACHE})


@dataclass(frozen=True, slots=True)
class Call:
    """What one kind of call needs and does on the device of its slot."""

    phase: str | None = None  # none: it only moves; what it leaves behind is of the phase that follows
    needs: Set[Item] = frozenset()
    conflicts_with: Set[Item] = frozenset()  # must have left
    brings: Set[Item] = frozenset()
    during: Set[Item] = frozenset()  # on the device only while the call lasts
    takes: Set[Item] = frozenset()
    beside: bool = False  # whether other calls may run meanwhile, except those that take models away


CALLS = {
    "start_ranks": Call(LOADING, conflicts_with=ENGINE, brings=MODELS | {Item.RESIDENTS}),
    "start_engine": Call(conflicts_with=TRAINED, brings=ENGINE),
    "acquire_device": Call(conflicts_with=ENGINE, brings=MODELS),
    "take_weights": Call(conflicts_with=ENGINE, brings=MODELS - {Item.OPTIMIZER}),
    "fetch_optimizer": Call(needs={Item.PARAMETERS}, conflicts_with=ENGINE, brings={Item.OPTIMIZER}, beside=True),
    "leave_optimizer": Call(takes={Item.OPTIMIZER}),
    "release_device": Call(takes=TRAINED),
    "sleep": Call(needs=ENGINE, takes=ENGINE),
    "wake(weights)": Call(brings={Item.ENGINE_WEIGHTS}),
    "wake(kv_cache)": Call(conflicts_with=TRAINED, brings={Item.KV_CACHE}),
    "generate": Call(GENERATING, needs=ENGINE, conflicts_with=TRAINED),
    "score": Call(TRAINING, needs={Item.PARAMETERS, Item.REFERENCE}, conflicts_with=ENGINE, during={Item.ACTIVATIONS}),
    "accumulate": Call(
        TRAINING, needs={Item.PARAMETERS}, conflicts_with=ENGINE, brings={Item.GRADIENTS}, during={Item.ACTIVATIONS}
    ),
    "step": Call(TRAINING, needs={Item.PARAMETERS, Item.OPTIMIZER}, conflicts_with=ENGINE, takes={Item.GRADIENTS}),
    "step_alone": Call(
        TRAINING,
        needs={Item.PARAMETERS},
        conflicts_with=ENGINE | {Item.OPTIMIZER},
        during={Item.ACTIVATIONS},
        takes={Item.GRADIENTS},
    ),
    "push": Call(
        SYNC,
        needs={Item.PARAMETERS, Item.ENGINE_WEIGHTS},
        conflicts_with={Item.KV_CACHE},
        during={Item.BUCKETS, Item.LAYER},
    ),
    "export": Call(SYNC, needs={Item.PARAMETERS}, conflicts_with={Item.KV_CACHE}, during={Item.BUCKETS}),
    "save": Call(SAVING, needs=MODELS, conflicts_with=ENGINE, during={Item.BUCKETS}),
    "load": Call(SAVING, needs=MODELS, conflicts_with=ENGINE),
}
"""`push` is a bucket between a slot's ranks and its engine, `export` one of ranks whose own engine takes no part."""

STEP = (
    *("start_ranks", "release_device", "start_engine"),
    *("sleep", "acquire_device", "load", "wake(weights)", "push", "release_device", "wake(kv_cache)", "generate"),
    *("sleep", "acquire_device", "score", "accumulate", "score", "step", "export"),
    *("wake(weights)", "push", "release_device", "wake(kv_cache)", "generate"),
    *("sleep", "acquire_device", "save", "release_device", "wake(weights)", "wake(kv_cache)"),
)
"""A slot from its start over one step to a checkpoint, with everything that may be there in a phase."""
WITH_STEP_RESIDENCY = {
    "start_ranks": ("start_ranks", "leave_optimizer"),
    "acquire_device": ("take_weights",),
    "step": ("step_alone",),
    "save": ("fetch_optimizer", "save", "leave_optimizer"),
    "load": ("fetch_optimizer", "load", "leave_optimizer"),
}
"""What takes the place of calls where optimizers are there for steps alone."""
MOVES = frozenset({"acquire_device", "take_weights", "release_device", "sleep", "wake(weights)", "wake(kv_cache)"})
"""Calls by which a device changes hands."""
CO_RESIDENT_STEP = (
    "start_engine",
    *(name for name in STEP if name not in {*MOVES, "start_engine"}),
)  # where it never does


class ResidencyError(RuntimeError):
    """Something would be used where it does not lie, or two would have a device at a time."""


class ResidencyReplay:
    """The devices of `slots` slots. `alternates`: engine and ranks take turns on them, else both stay."""

    def __init__(self, slots: int, alternates: bool = True):
        self.alternates = alternates
        self.held: list[set[Item]] = [set() for _ in range(slots)]
        self.seen: dict[str, set[Item]] = {phase: set() for phase in PHASES}
        """What lay on any device in each phase."""
        self._away: list[set[Item]] = [set() for _ in range(slots)]
        self._last = ["nothing"] * slots
        self._under_way: list[list[str]] = [[] for _ in range(slots)]

    @contextmanager
    def doing(self, name: str, *slots: int) -> Iterator[None]:
        """The call `name` lasts as long as the block, on these slots. ResidencyError if it can't be."""
        for slot in slots:
            self._begin(name, slot)
        try:
            yield
        finally:
            for slot in slots:
                self._end(name, slot)

    def lose_engine(self, slot: int) -> None:
        """The slot's engine died, and what it held with it."""
        self.held[slot] -= ENGINE
        self._last[slot] = "the loss of its engine"

    def _begin(self, name: str, slot: int) -> None:
        call, here = CALLS[name], self.held[slot]
        if missing := call.needs - here:
            raise self._refusal(name, slot, f"needs {_listed(missing)} on the device")
        if not self.alternates and name in MOVES:
            raise self._refusal(name, slot, "would move resident items although engine and ranks both stay")
        away = call.conflicts_with
        if not self.alternates:  # both sides stay: only what a side itself keeps away
            away = away - ENGINE if away >= ENGINE else frozenset()
        if beside := away & here:
            raise self._refusal(name, slot, f"finds {_listed(beside)} on the device")
        if others := [other for other in self._under_way[slot] if self._clash(name, other)]:
            raise self._refusal(name, slot, f"begins while {others[0]} is under way")
        self._under_way[slot].append(name)
        here |= call.brings | (self._away[slot] - {Item.OPTIMIZER} if name.startswith("take") else set())
        for each in map(CALLS.__getitem__, self._under_way[slot]):
            if each.phase is not None:
                self.seen[each.phase] |= here | each.during

    def _end(self, name: str, slot: int) -> None:
        self._under_way[slot].remove(name)
        self._last[slot] = name
        if name == "release_device":
            self._away[slot] = self.held[slot] & CALLS[name].takes
        self.held[slot] -= CALLS[name].takes

    def _clash(self, *names: str) -> bool:
        """Whether two calls can't be under way at a time."""
        if not self.alternates and "start_engine" in names:  # nothing of it depends on what ranks do meanwhile
            return False
        pair = [CALLS[name] for name in names]
        if any(call.beside for call in pair):
            return any(call.takes & MODELS for call in pair)
        return "start_ranks" in names or any(call.phase is None for call in pair)

    def _refusal(self, name: str, slot: int, why: str) -> ResidencyError:
        there = _listed(self.held[slot]) or "nothing"
        return ResidencyError(f"slot {slot}: {name} {why}. There: {there}; the last call was {self._last[slot]}")


def _listed(items: Collection[Item]) -> str:
    return ", ".join(item for item in Item if item in items)


@functools.cache
def contents(optimizers_alone: bool = False, alternates: bool = True) -> dict[str, frozenset[Item]]:
    """What may lie on a device in each phase; `optimizers_alone`: each is there in its own steps only."""
    ledger, instead = ResidencyReplay(1, alternates), WITH_STEP_RESIDENCY if optimizers_alone else {}
    step = STEP if alternates else CO_RESIDENT_STEP
    for name in chain.from_iterable(instead.get(name, (name,)) for name in step):
        with ledger.running(name, 0):
            pass
    return {phase: frozenset(items) for phase, items in ledger.resident.items()}
