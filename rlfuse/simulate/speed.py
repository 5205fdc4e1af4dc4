"""Piecewise constant speed of a simulated slot; 0.5 does half a second of cost in a second."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


def evenly_spaced(speeds: Sequence[T], count: int) -> tuple[T, ...]:
    """Speeds of `count` slots that stand for all, from every part of them; none where none are given."""
    return tuple(speeds[number * len(speeds) // count] for number in range(count)) if speeds else ()


class Speed:
    """`changes`: (from when on, speed), in the order of time; the first one holds before it, too."""

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
        """When so many seconds of cost are done that begin at `start`."""
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
    """What all of them do in a second."""
    starts = [[(0.0, 0.0), *speed.changes] for speed in speeds]  # each begins from nothing
    changes = sorted((time, after - before) for each in starts for (_, before), (time, after) in pairwise(each))
    total, summed = 0.0, list[tuple[float, float]]()
    for time, jump in changes:
        total += jump
        if summed and summed[-1][0] == time:
            summed.pop()
        summed.append((time, total))
    return Speed(summed)
