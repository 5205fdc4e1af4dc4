"""Check decisions against their snapshot, and explain why one is invalid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, get_args

from rlfuse.fusion.decisions import (
    Accumulate,
    Decision,
    Generate,
    Move,
    OptimizerStep,
    Score,
    Slot,
    Snapshot,
    Switch,
    Train,
)
from rlfuse.fusion.states import SampleState

SHOWN = 8  # maximum names listed in a message


class InvalidDecision(Exception):
    """Raised for a decision that cannot be executed. The message gives the reason and valid choices."""


def check(view: Snapshot, decisions: Sequence[Decision]) -> None:
    """Raise Refused, with the decision in front, for the first that can't be carried out together with the others."""
    reading = _DecisionChecker(view)
    for decision in decisions:
        try:
            reading.take(decision)
        except (InvalidDecision, TypeError, AttributeError) as why:  # the latter of fields that are of another type
            raise InvalidDecision(f"{_short(repr(decision))} cannot be executed: {why}") from None


def listed(names: Iterable[object]) -> str:
    """Return the first few names for a message."""
    found = [str(name) for name in islice(iter(names), SHOWN + 1)]
    return ", ".join(found[:SHOWN]) + (", ..." if len(found) > SHOWN else "") if found else "none"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:150]} ... {text[-40:]}"


class _DecisionChecker:
    def __init__(self, view: Snapshot):
        self.view = view
        self.working: set[int] = set()  # slots that switch, score or train
        self.filled: set[int] = set()  # slots that get samples to generate
        self.groups: set[int] = set()
        self.names: set[tuple[str, str]] = set()

    def take(self, decision: Decision) -> None:
        checks: dict[type, Any] = {Move: self._move, Switch: self._switch, Score: self._score, Train: self._train}
        checks |= {Generate: self._generate, Accumulate: self._accumulate, OptimizerStep: self._step}
        if type(decision) not in checks:
            kinds = ", ".join(kind.__name__ for kind in get_args(Decision))
            raise InvalidDecision(f"a {type(decision).__name__} is not a decision; valid types: {kinds}")
        checks[type(decision)](decision)

    def _generate(self, decision: Generate) -> None:
        self._generates(decision.slot)
        self._among("group", decision.groups, self.view.waiting, self.groups)

    def _step(self, decision: OptimizerStep) -> None:
        models = _all_of(decision.model, decision.also)
        for model in models:
            if model not in (able := self.view.ready_to_step):
                raise InvalidDecision(f"{model!r} is not ready for its optimizer step; models that are: {listed(able)}")
        self._among("model", models, self.view.ready_to_step, self.names, "step")
        self._all_work()

    def _slot(self, slot: int) -> Slot:
        count = len(self.view.slots)
        if not isinstance(slot, int) or not 0 <= slot < count:
            raise InvalidDecision(f"there is no slot {slot}; valid: 0 to {count - 1}")
        return self.view.slots[slot]

    def _generates(self, slot: int) -> Slot:
        place = self._slot(slot)
        if not _can_generate(place):
            able = listed(each.index for each in self.view.slots if _can_generate(each))
            why = "is drained" if place.drained else "cannot generate now"
            raise InvalidDecision(f"slot {slot} {why}; slots that can generate: {able}")
        if slot in self.working:
            raise InvalidDecision(f"slot {slot} was given other work in the same list")
        self.filled.add(slot)
        return place

    def _works(self, slot: int, able: Collection[int], what: str) -> None:
        drained = self._slot(slot).drained
        if slot not in able:
            why = f"{what}, as it is drained" if drained else what
            raise InvalidDecision(f"slot {slot} is not an {why}; slots that are: {listed(able)}")
        if slot in self.working or slot in self.filled:
            raise InvalidDecision(f"slot {slot} was given other work in the same list")
        self.working.add(slot)

    def _all_work(self) -> None:
        for slot in (all_ := range(len(self.view.slots))):
            able = all_ if self.view.all_ranks_idle else self.view.idle_trainers
            self._works(slot, able, "idle trainer, and all must be")

    def _ranks(self, slot: int | None, lockstep: bool) -> None:
        if lockstep and slot is not None:
            raise InvalidDecision("the models are sharded over all ranks, which run this call jointly: set slot=None")
        if lockstep:
            self._all_work()
        elif slot is None:
            raise InvalidDecision(f"a slot is required; idle trainers: {listed(self.view.idle_trainers)}")
        else:
            self._works(slot, self.view.idle_trainers, "idle trainer")

    def _among(self, what: str, given: tuple, valid: Collection, taken: set, key: str | None = None) -> None:
        """Take a tuple of `valid` items, none of them taken yet for `key`."""
        if not isinstance(given, tuple) or not given:
            raise InvalidDecision(f"a tuple with at least one {what} is required; valid: {listed(valid)}")
        for each in given:
            if not isinstance(each, int | str) or each not in valid:
                raise InvalidDecision(f"{what} {each!r} is not waiting for this; valid: {listed(valid)}")
            if (marked := each if key is None else (each, key)) in taken:
                raise InvalidDecision(f"{what} {each!r} appears twice in the same list")
            taken.add(marked)

    def _move(self, decision: Move) -> None:
        source = self._slot(decision.source)
        if decision.source == decision.target:
            raise InvalidDecision("source and target are the same slot")
        if decision.carry not in ("kv", "tokens"):
            raise InvalidDecision(f"carry={decision.carry!r}; valid: kv, tokens")
        staying = {name for name, sample in source.samples.items() if sample.state is not SampleState.LEAVING}
        self._among("sample", decision.samples, staying, self.names, "move")
        self._generates(decision.target)

    def _switch(self, decision: Switch) -> None:
        place, roles = self._slot(decision.slot), ("rollout", "trainer")
        if decision.role not in roles:
            raise InvalidDecision(f"there is no role {decision.role!r}; valid: {listed(roles)}")
        if decision.role == place.role:
            raise InvalidDecision(f"slot {decision.slot} already has that role")
        if decision.role == "rollout":
            able = [slot for slot in self.view.idle_trainers if self.view.slots[slot].alive]
            self._works(decision.slot, able, "idle trainer with an engine")
        else:
            self._works(decision.slot, self.view.idle_engines, "engine without samples")

    def _score(self, decision: Score) -> None:
        view, kinds = self.view, _all_of(decision.kind, decision.also)
        for kind in kinds:
            if not isinstance(kind, str) or kind not in (valid := view.unscored.keys() | view.deferred.keys()):
                raise InvalidDecision(f"there is no kind of scoring {kind!r}; valid: {listed(valid)}")
        if len(kinds) > 1 and "reward" in kinds:
            raise InvalidDecision("rewards are scored in separate calls: leave `also` empty")
        if decision.kind != "reward":
            self._ranks(decision.slot, view.settings.lockstep)
        elif decision.slot is not None:
            raise InvalidDecision("rewards are not scored on slots: set slot=None")
        for kind in kinds:
            parts = [view.unscored.get(kind, {}), *view.deferred.get(kind, {}).values()]
            first = decision.samples[0] if isinstance(decision.samples, tuple) and decision.samples else None
            chosen = next((part for part in parts if first in part), parts[0])  # samples of one mini-batch
            self._among("sample", decision.samples, chosen, self.names, kind)

    def _accumulate(self, decision: Accumulate) -> None:
        if self.view.settings.pipelined:
            raise InvalidDecision("the models are pipelined and train in one schedule: return Train instead")
        models = _all_of(decision.model, decision.also)
        for model in models:
            self._model(model)
        self._ranks(decision.slot, self.view.settings.lockstep_backward)
        for model in models:
            self._among("sample", decision.samples, self.view.ready[model], self.names, model)

    def _train(self, decision: Train) -> None:
        if not self.view.settings.pipelined:
            raise InvalidDecision("the models are not pipelined: return Accumulate instead")
        if not decision.samples:
            raise InvalidDecision(f"samples of at least one model are required; models: {listed(self.view.ready)}")
        self._all_work()
        for model, names in decision.samples.items():
            self._model(model)
            self._among("sample", names, self.view.ready[model], self.names, model)
        for kind, names in decision.passes.items():
            later = {name for part in self.view.deferred.get(kind, {}).values() for name in part}
            self._among("sample", names, later, self.names, kind)

    def _model(self, model: str) -> None:
        if model not in self.view.ready:
            raise InvalidDecision(f"there is no model {model!r} to train; models: {listed(self.view.ready)}")


def _all_of(first: str, also: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(also, tuple):
        raise InvalidDecision(f"also={also!r}: must be a tuple")
    return (first, *also)


def _can_generate(place: Slot) -> bool:
    return place.role == "rollout" and place.alive and not place.busy and not place.drained
