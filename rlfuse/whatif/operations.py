"""Operations that wait for one another: what ran where and when.

An operation starts when all that it waits for have ended; members of a group (a collective, a send and its receive) end
by their own transfer after the last of them started.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ALONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Arrays over N operations. Times are seconds."""

    kind: np.ndarray  # int [N]: index into `kinds`
    kinds: tuple[str, ...]
    step: np.ndarray  # int [N]: number of the step, from 0 without gaps
    stage: np.ndarray  # int [N]: of the pipeline
    rank: np.ndarray  # int [N]: data-parallel
    start: np.ndarray
    end: np.ndarray
    waits: np.ndarray  # int [E, 2]: (an operation, what it waits for)
    group: np.ndarray  # int [N]: operations with the same number end together; `ALONE`: in no group
    communicates: np.ndarray  # bool [N]: by its kind, whether or not it is in a group
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """int [P, 3]: forward and backward of one micro-batch on one worker, and the chunk of the model that they run."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def steps(self) -> int:
        return int(self.step.max()) + 1

    @property
    def stages(self) -> int:
        return int(self.stage.max()) + 1

    @property
    def ranks(self) -> int:
        return int(self.rank.max()) + 1

    def own_seconds(self) -> np.ndarray:
        """float [N]: what each took by itself: a transfer counts from when the last of its group had started."""
        starts = self.start.copy()
        grouped = self.group != ALONE
        last = np.full(self.group.max(initial=0) + 1, -np.inf)
        np.maximum.at(last, self.group[grouped], self.start[grouped])
        starts[grouped] = last[self.group[grouped]]
        return np.maximum(self.end - starts, 0.0)  # clocks of two hosts differ

    def kinds_of(self, *names: str) -> np.ndarray:
        """bool [N]: of one of these kinds."""
        return np.isin(self.kind, [number for number, name in enumerate(self.kinds) if name in names])
