"""Operations with dependencies, and their replay with other durations.

An operation starts when all of its dependencies have ended. Members of a group (a collective, or a send and its
receive) start their transfer when the last of them has started.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np

NO_GROUP = -1


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
    waits: np.ndarray  # int [E, 2]: (operation, its dependency)
    group: np.ndarray  # int [N]: operations with the same number synchronize; or `NO_GROUP`
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """int [P, 3]: forward and backward of a micro-batch on one worker, and their model chunk."""

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

    def durations(self) -> np.ndarray:
        """Return float [N]: durations; those of group members count from the start of the last one."""
        starts = self.start.copy()
        grouped = self.group != NO_GROUP
        last = np.full(self.group.max(initial=0) + 1, -np.inf)
        np.maximum.at(last, self.group[grouped], self.start[grouped])
        starts[grouped] = last[self.group[grouped]]
        return np.maximum(self.end - starts, 0.0)  # clocks of two hosts differ

    def has_kind(self, *names: str) -> np.ndarray:
        return np.isin(self.kind, [number for number, name in enumerate(self.kinds) if name in names])


class CircularWait(ValueError):
    """Operations with cyclic dependencies."""


class Replay:
    """Replay of recorded operations with other durations."""

    def __init__(self, operations: Operations):
        self.operations = operations
        count = len(operations)
        unit = np.arange(count)  # scheduling unit: an operation, or a group (number of its first member)
        grouped = np.flatnonzero(operations.group != NO_GROUP)
        _, first, of = np.unique(operations.group[grouped], return_index=True, return_inverse=True)
        unit[grouped] = grouped[first[of]]
        self._members, self._member_from = _rows(unit, np.arange(count), count)
        waiting, before = operations.waits.T
        self._before, self._before_from = _rows(waiting, before, count)
        after, after_from = _rows(unit[before], unit[waiting], count)
        self._order = _topological(self._member_from, after, after_from)
        if len(self._order) < np.count_nonzero(np.diff(self._member_from)):
            raise CircularWait(_circle(operations, unit, set(self._order.tolist())))

    def ends(self, seconds: np.ndarray) -> np.ndarray:
        """Return float [N]: end time of each operation, given durations, float [N]."""
        ends = np.empty(len(self.operations))
        arrays = (self._order, self._members, self._member_from, self._before, self._before_from)
        _run(*arrays, seconds.astype(np.float64), ends)
        return ends

    def step_seconds(self, seconds: np.ndarray) -> np.ndarray:
        """Return float [steps]: end time of the last operation of each step."""
        longest = np.zeros(self.operations.steps)
        np.maximum.at(longest, self.operations.step, self.ends(seconds))
        return longest


def _rows(keys: np.ndarray, values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the values grouped by key, and the offsets of each key (as in a CSR matrix)."""
    order = np.argsort(keys, kind="stable")
    return values[order], np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=count))])


@numba.njit(cache=True)
def _topological(member_from, after, after_from):
    """Return the units in topological order, without those in cycles."""
    count = len(member_from) - 1
    missing = np.zeros(count, np.int64)
    for unit in after:
        missing[unit] += 1
    order, filled = np.empty(count, np.int64), 0
    for unit in range(count):
        if missing[unit] == 0 and member_from[unit] < member_from[unit + 1]:
            order[filled] = unit
            filled += 1
    done = 0
    while done < filled:
        unit = order[done]
        done += 1
        for position in range(after_from[unit], after_from[unit + 1]):
            later = after[position]
            missing[later] -= 1
            if missing[later] == 0:
                order[filled] = later
                filled += 1
    return order[:filled]


@numba.njit(cache=True)
def _run(order, members, member_from, before, before_from, seconds, ends):
    for unit in order:
        start = 0.0
        for position in range(member_from[unit], member_from[unit + 1]):
            member = members[position]
            for wait in range(before_from[member], before_from[member + 1]):
                start = max(start, ends[before[wait]])
        for position in range(member_from[unit], member_from[unit + 1]):
            member = members[position]
            ends[member] = start + seconds[member]


def _circle(operations: Operations, unit: np.ndarray, done: set[int]) -> str:
    stuck = next(number for number in range(len(operations)) if int(unit[number]) not in done)
    name = operations.kinds[operations.kind[stuck]]
    return (
        f"{name} of step {operations.step[stuck]} on stage {operations.stage[stuck]}, rank {operations.rank[stuck]} "
        "depends on itself through other operations; check its times and its numbers within the step"
    )
