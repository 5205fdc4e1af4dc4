"""Piecewise constant speed of a simulated slot; at 0.5, a second does half a second of cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


def evenly_spaced(speeds: Sequence[T], count: int) -> tuple[T, ...]:
    """Return `count` evenly spaced elements of `speeds`; empty if `speeds` is empty."""
    return tuple(speeds[number * len(speeds) // count] for number in range(count)) if speeds else ()


class Speed:
    """Speed over time. `changes`: (start time, speed) in order of time; the first speed also holds before its time."""

    def __init__(self, changes: Sequence[tuple[float, float]] = ((0.0, 1.0),)):
        self.changes = tuple(changes)
        self._times, self._speeds = zip(*changes, strict=True)
        pieces = [(later - time) * speed for (time, speed), (later, _) in pairwise(changes)]
        self._done = list(accumulate(pieces, initial=0.0))
        self.least, self.most = min(self._speeds), max(self._speeds)

    def done(self, start: float, end: float) -> float:
        if len(self._times) == 1:
            return (end - start) * self._speeds[0]
        return self._until(end) - self._until(start)

    def end(self, start: float, cost: float) -> float:
        """Return when `cost` seconds of cost, started at `start`, are done."""
        if len(self._times) == 1:
            return start + cost / self._speeds[0]
        piece = max(0, bisect_right(self._times, start) - 1)
        while piece + 1 < len(self._times):
            here = (self._times[piece + 1] - start) * self._speeds[piece]
            if cost <= here:
                break
            start, cost, piece = self._times[piece + 1], cost - here, piece + 1
        return start + cost / self._speeds[piece]

    def _until(self, when: float) -> float:
        piece = max(0, bisect_right(self._times, when) - 1)
        return self._done[piece] + (when - self._times[piece]) * self._speeds[piece]

    def times(self, factor: float) -> Speed:
        return Speed([(time, speed * factor) for time, speed in self.changes])

    def later(self, seconds: float) -> Speed:
        return Speed([(time + seconds, speed) for time, speed in self.changes])


def combined_speed(speeds: Iterable[Speed]) -> Speed:
    """Return the sum of the speeds over time."""
    starts = [[(0.0, 0.0), *speed.changes] for speed in speeds]  # each starts at speed 0
    changes = sorted((time, after - before) for each in starts for (_, before), (time, after) in pairwise(each))
    total, summed = 0.0, list[tuple[float, float]]()
    for time, jump in changes:
        total += jump
        if summed and summed[-1][0] == time:
            summed.pop()
        summed.append((time, total))
    return Speed(summed)
