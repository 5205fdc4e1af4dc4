"""Replay of the calls that move items of a slot's device; a call that needs an item that is not resident fails.

Role: engines and ranks of `resident_engines` make their calls on a `ResidencyReplay`. With
actor.optimizer_residency=step an optimizer is resident only during checkpoints and its steps (`step_alone`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from rlfuse.engines.memory.residency import ENGINE, GENERATING, LOADING, MODELS, PHASES, SAVING, SYNC, TRAINING, Item

TRAINED = MODELS | {Item.GRADIENTS}


@dataclass(frozen=True, slots=True)
class Call:
    """Requirements and effects of a kind of call on the device of its slot."""

    phase: str | None = None  # None: a move between phases, which counts to the next phase
    needs: Set[Item] = frozenset()
    conflicts_with: Set[Item] = frozenset()  # must not be resident
    loads: Set[Item] = frozenset()
    during: Set[Item] = frozenset()  # resident only during the call
    frees: Set[Item] = frozenset()
    is_concurrent: bool = False  # may run concurrently with calls that do not free models


CALLS = {
    "start_ranks": Call(LOADING, conflicts_with=ENGINE, loads=MODELS | {Item.RESIDENTS}),
    "start_engine": Call(conflicts_with=TRAINED, loads=ENGINE),
    "acquire_device": Call(conflicts_with=ENGINE, loads=MODELS),
    "take_weights": Call(conflicts_with=ENGINE, loads=MODELS - {Item.OPTIMIZER}),
    "fetch_optimizer": Call(needs={Item.PARAMETERS}, conflicts_with=ENGINE, loads={Item.OPTIMIZER}, is_concurrent=True),
    "leave_optimizer": Call(frees={Item.OPTIMIZER}),
    "release_device": Call(frees=TRAINED),
    "sleep": Call(needs=ENGINE, frees=ENGINE),
    "wake(weights)": Call(loads={Item.ENGINE_WEIGHTS}),
    "wake(kv_cache)": Call(conflicts_with=TRAINED, loads={Item.KV_CACHE}),
    "generate": Call(GENERATING, needs=ENGINE, conflicts_with=TRAINED),
    "score": Call(TRAINING, needs={Item.PARAMETERS, Item.REFERENCE}, conflicts_with=ENGINE, during={Item.ACTIVATIONS}),
    "accumulate": Call(
        TRAINING, needs={Item.PARAMETERS}, conflicts_with=ENGINE, loads={Item.GRADIENTS}, during={Item.ACTIVATIONS}
    ),
    "step": Call(TRAINING, needs={Item.PARAMETERS, Item.OPTIMIZER}, conflicts_with=ENGINE, frees={Item.GRADIENTS}),
    "step_alone": Call(
        TRAINING,
        needs={Item.PARAMETERS},
        conflicts_with=ENGINE | {Item.OPTIMIZER},
        during={Item.ACTIVATIONS},
        frees={Item.GRADIENTS},
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
"""`push` sends a bucket from a slot's ranks to its engine; `export` is a bucket of ranks without their own engine."""

STEP = (
    *("start_ranks", "release_device", "start_engine"),
    *("sleep", "acquire_device", "load", "wake(weights)", "push", "release_device", "wake(kv_cache)", "generate"),
    *("sleep", "acquire_device", "score", "accumulate", "score", "step", "export"),
    *("wake(weights)", "push", "release_device", "wake(kv_cache)", "generate"),
    *("sleep", "acquire_device", "save", "release_device", "wake(weights)", "wake(kv_cache)"),
)
"""Calls on a slot from startup over one step to a checkpoint, which cover all items of each phase."""
WITH_STEP_RESIDENCY = {
    "start_ranks": ("start_ranks", "leave_optimizer"),
    "acquire_device": ("take_weights",),
    "step": ("step_alone",),
    "save": ("fetch_optimizer", "save", "leave_optimizer"),
    "load": ("fetch_optimizer", "load", "leave_optimizer"),
}
"""Replacements of calls with actor.optimizer_residency=step."""
MOVES = frozenset({"acquire_device", "take_weights", "release_device", "sleep", "wake(weights)", "wake(kv_cache)"})
"""Calls that switch a device between engine and ranks."""
CO_RESIDENT_STEP = (
    "start_engine",
    *(name for name in STEP if name not in {*MOVES, "start_engine"}),
)  # where it never does


class ResidencyError(RuntimeError):
    """A call would need an item that is not resident, or conflict with one that is."""


class ResidencyReplay:
    """Replay of calls on the devices of `slots` slots. `alternates`: engine and ranks alternate, otherwise both
    stay."""

    def __init__(self, slots: int, alternates: bool = True):
        self.alternates = alternates
        self.held: list[set[Item]] = [set() for _ in range(slots)]
        self.resident: dict[str, set[Item]] = {phase: set() for phase in PHASES}
        """Items that were resident on any device in each phase."""
        self._away: list[set[Item]] = [set() for _ in range(slots)]
        self._last = ["nothing"] * slots
        self._running: list[list[str]] = [[] for _ in range(slots)]

    @contextmanager
    def running(self, name: str, *slots: int) -> Iterator[None]:
        """Run the call `name` on these slots for the duration of the context. Raises ResidencyError if it is not
        allowed."""
        for slot in slots:
            self._begin(name, slot)
        try:
            yield
        finally:
            for slot in slots:
                self._end(name, slot)

    def lose_engine(self, slot: int) -> None:
        """Record that the slot's engine died, which frees its memory."""
        self.held[slot] -= ENGINE
        self._last[slot] = "the loss of its engine"

    def _begin(self, name: str, slot: int) -> None:
        call, here = CALLS[name], self.held[slot]
        if missing := call.needs - here:
            raise self._refusal(name, slot, f"needs {_listed(missing)} on the device")
        if not self.alternates and name in MOVES:
            raise self._refusal(name, slot, "would move resident items although engine and ranks both stay")
        away = call.conflicts_with
        if not self.alternates:  # both stay, so only conflicts within one side count
            away = away - ENGINE if away >= ENGINE else frozenset()
        if conflicting := away & here:
            raise self._refusal(name, slot, f"conflicts with {_listed(conflicting)} on the device")
        if others := [other for other in self._running[slot] if self._clash(name, other)]:
            raise self._refusal(name, slot, f"begins while {others[0]} is running")
        self._running[slot].append(name)
        here |= call.loads | (
            self._away[slot] - {Item.OPTIMIZER} if name in ("acquire_device", "take_weights") else set()
        )
        for each in map(CALLS.__getitem__, self._running[slot]):
            if each.phase is not None:
                self.resident[each.phase] |= here | each.during

    def _end(self, name: str, slot: int) -> None:
        self._running[slot].remove(name)
        self._last[slot] = name
        if name == "release_device":
            self._away[slot] = self.held[slot] & CALLS[name].frees
        self.held[slot] -= CALLS[name].frees

    def _clash(self, *names: str) -> bool:
        """Return whether two calls must not run at the same time."""
        if not self.alternates and "start_engine" in names:  # independent of the ranks' calls
            return False
        pair = [CALLS[name] for name in names]
        if any(call.is_concurrent for call in pair):
            return any(call.frees & MODELS for call in pair)
        return "start_ranks" in names or any(call.phase is None for call in pair)

    def _refusal(self, name: str, slot: int, why: str) -> ResidencyError:
        there = _listed(self.held[slot]) or "nothing"
        return ResidencyError(f"slot {slot}: {name} {why}. Resident: {there}; the last call was {self._last[slot]}")


def _listed(items: Collection[Item]) -> str:
    return ", ".join(item for item in Item if item in items)


@functools.cache
def replayed_contents(optimizers_alone: bool = False, alternates: bool = True) -> dict[str, frozenset[Item]]:
    """Return the items that the calls of a step leave on a device in each phase (see residency.contents)."""
    ledger, instead = ResidencyReplay(1, alternates), WITH_STEP_RESIDENCY if optimizers_alone else {}
    step = STEP if alternates else CO_RESIDENT_STEP
    for name in chain.from_iterable(instead.get(name, (name,)) for name in step):
        with ledger.running(name, 0):
            pass
    return {phase: frozenset(items) for phase, items in ledger.resident.items()}
