"""What a fusion policy sees and what it may decide: plain data, nothing of Ray, vLLM or torch.

Role: the language between the controller (real or simulated) and the policies. A policy is a function
`Snapshot -> list[Decision]`; the controller asks it whenever something finished and starts what it decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Generate:
    """Hand whole groups to a rollout slot: siblings stay together and share their prompt's KV cache."""

    slot: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Run one kind of scoring (`reward`, `old_log_prob`, `ref`, `values`) on finished samples."""

    kind: str
    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """One optimizer step of critic and actor on a mini-batch."""

    mini_batch: int


Decision = Generate | Score | Train


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where every sample of a step stands."""

    loads: tuple[int, ...]
    """Unfinished samples per rollout slot."""
    waiting: tuple[tuple[int, int], ...]
    """(group, samples in it) of groups that no slot has yet."""
    unscored: dict[str, tuple[str, ...]]
    """Kind of scoring -> finished samples that still lack it, none of them under way; kinds in the serial order."""
    running: frozenset[str] = field(default_factory=frozenset)
    """Work under way: kinds of scoring, and `train`."""
    trainable: int | None = None
    """The next mini-batch, when every sample of the step is scored."""

    @property
    def generating(self) -> int:
        return sum(self.loads)


Policy = Callable[[Snapshot], list[Decision]]
