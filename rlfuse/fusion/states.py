"""State machines of the samples and groups of a step. An invalid transition raises RuntimeError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeVar

from rlfuse.samples import Group, Sample

State = TypeVar("State", bound=StrEnum)


class SampleState(StrEnum):
    """State of one sample."""

    WAITING = auto()  # not on a slot
    GENERATING = auto()  # on an engine
    LEAVING = auto()  # on an engine that is evicting it
    MOVING = auto()  # between two engines
    FINISHED = auto()  # its response is complete; scores are missing
    SCORED = auto()  # every score that its advantage needs is available
    UNNEEDED = auto()  # the step does not use it


class GroupState(StrEnum):
    """State of the samples of one prompt."""

    GENERATING = auto()  # some samples are unfinished
    GENERATED = auto()  # all are finished; some scores are missing
    COMPLETE = auto()  # all are scored: the group can be prepared
    UNNEEDED = auto()  # the step does not use the group


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
    """Bookkeeping of one sample of the step."""

    sample: Sample = field(repr=False)
    id: str
    group: GroupRecord = field(repr=False)
    carried: int  # response tokens that it had when it entered its engine
    missing: set[str]  # kinds of scoring without a result
    state: SampleState = SampleState.WAITING
    slot: int | None = None  # slot of its engine
    target: int | None = None  # slot that it moves to, which has reserved capacity for it
    steps_before: float = 0.0  # decoding steps the engine had done when the sample entered
    moved: bool = False  # it was moved, so its first decoding step on this engine is not known
    expected: float = 0.0  # expected response tokens
    reserved: float = 0.0  # tokens of KV cache reserved for it
    prepared: bool = False  # its advantage is computed; deferred passes may still be missing
    skipped: bool = False  # the actor's loss of it is 0 (`algorithms.zero_advantage`), so it gets no actor passes
    trains: bool = True  # False for a baseline, and once its reward or that of its baseline failed

    def transition_to(self, state: SampleState) -> None:
        if state not in _NEXT_OF_SAMPLE[self.state]:
            raise RuntimeError(f"sample {self.id} cannot change to {state}: it is {self.state}")
        self.state = state


@dataclass(slots=True, eq=False)
class GroupRecord:
    """Bookkeeping of one group of the step; `number` is its position in prompt order."""

    number: int
    group: Group
    prompt_tokens: int
    expected: float  # expected response tokens of each sample, before any is generated
    unfinished: int
    unscored: int  # samples without a score that the advantage needs
    chosen: bool  # the step trains on it, as far as decided
    generated: int = 0  # samples that were generated in this step
    next_step: bool = False  # drawn for the next step: admitted once no group of this step waits
    state: GroupState = GroupState.GENERATING
    samples: list[SampleRecord] = field(default_factory=list)
    waiting: dict[str, SampleRecord] = field(default_factory=dict)  # in the order of generation

    @property
    def unneeded(self) -> bool:
        return self.state is GroupState.UNNEEDED

    def transition_to(self, state: GroupState) -> None:
        if state not in _NEXT_OF_GROUP[self.state]:
            raise RuntimeError(f"group {self.number} cannot change to {state}: it is {self.state}")
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
