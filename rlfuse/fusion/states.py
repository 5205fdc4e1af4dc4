"""The state of each sample and group of a step; an impossible transition is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeVar

from rlfuse.samples import Group, Sample

State = TypeVar("State", bound=StrEnum)


class SampleState(StrEnum):
    """Where one sample is."""

    WAITING = auto()  # no slot has it
    GENERATING = auto()  # on an engine
    LEAVING = auto()  # on an engine that was told to hand it over
    MOVING = auto()  # between two engines
    FINISHED = auto()  # its response is whole; it lacks scores
    SCORED = auto()  # it has every score that its advantage needs
    UNNEEDED = auto()  # the step ends without it


class GroupState(StrEnum):
    """How far the samples of one prompt are."""

    GENERATING = auto()  # some are not finished
    GENERATED = auto()  # all are finished; some lack scores
    COMPLETE = auto()  # all are scored: the group can be prepared
    UNNEEDED = auto()  # the step ends without the group


def _following(kind: type[State], **following: str) -> Mapping[State, frozenset[State]]:
    return {kind(state): frozenset(map(kind, names.split())) for state, names in following.items()}


_NEXT_OF_SAMPLE = _following(
    SampleState,
    waiting="generating unneeded",
    generating="leaving finished waiting unneeded",
    leaving="moving finished waiting unneeded",
    moving="generating",
    finished="scored",
    scored="",
    unneeded="",
)
_NEXT_OF_GROUP = _following(
    GroupState, generating="generated unneeded", generated="complete unneeded", complete="unneeded", unneeded=""
)


@dataclass(slots=True, eq=False)
class SampleRecord:
    """One sample of the step."""

    sample: Sample = field(repr=False)
    id: str
    group: GroupRecord = field(repr=False)
    carried: int  # response tokens that it has when it comes to an engine
    missing: set[str]  # kinds of scoring that it has no result of
    state: SampleState = SampleState.WAITING
    slot: int | None = None  # whose engine holds it
    target: int | None = None  # the slot that it was told to move to, which keeps room for it
    steps_before: float = 0.0  # decoding steps the engine had done when it came
    moved: bool = False  # it came from another engine: when it began to decode here is not known to the step
    expected: float = 0.0  # response tokens that it is expected to have in the end
    reserved: float = 0.0  # tokens of KV cache that room was made for
    prepared: bool = False  # its advantage is computed; deferred passes may be missing

    def transition_to(self, state: SampleState) -> None:
        if state not in _NEXT_OF_SAMPLE[self.state]:
            raise RuntimeError(f"sample {self.id} can't become {state}: it is {self.state}")
        self.state = state


@dataclass(slots=True, eq=False)
class GroupRecord:
    """One group of the step; `number`: its place in prompt order."""

    number: int
    group: Group
    prompt_tokens: int
    expected: float  # response tokens expected of each sample, before any is generated
    unfinished: int
    unscored: int  # samples that lack a score which the advantage needs
    chosen: bool  # whether the step trains on it, as far as that is decided
    generated: int = 0  # samples that were generated in this step
    next_step: bool = False  # drawn for the next step: it is admitted when nothing of this one waits
    state: GroupState = GroupState.GENERATING
    samples: list[SampleRecord] = field(default_factory=list)
    waiting: dict[str, SampleRecord] = field(default_factory=dict)  # in the order of generation

    @property
    def unneeded(self) -> bool:
        return self.state is GroupState.UNNEEDED

    def transition_to(self, state: GroupState) -> None:
        if state not in _NEXT_OF_GROUP[self.state]:
            raise RuntimeError(f"group {self.number} can't become {state}: it is {self.state}")
        self.state = state

    def finish(self) -> bool:
        """Count a finished sample; return whether it was the last one."""
        self.unfinished -= 1
        if not self.unfinished:
            self.transition_to(GroupState.GENERATED)
        return not self.unfinished

    def score(self) -> bool:
        """Count a scored sample; return whether the group is complete."""
        self.unscored -= 1
        if not self.unscored:
            self.transition_to(GroupState.COMPLETE)
        return not self.unscored
