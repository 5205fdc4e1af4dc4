"""Shard the clips of a batch over ranks: contiguous and balanced, without changing the tower's results. Pure.

Clips are split at multiples of `step` units (temporal patches), since the last bits of a matrix product may depend on
its number of rows. The maximum load is the smallest of all contiguous shardings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

USABLE_TIME_SHARE = 0.8
"""Fraction of the available time that is planned for encoding ahead, since clips and steps vary."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Multiply-adds of the tower for one unit, by its number of patches.

    Projections, MLP and window attention are linear in it; attention over the unit is quadratic.
    """

    per_patch: int
    per_pair: int

    def unit(self, patches: int) -> int:
        return self.per_patch * patches + self.per_pair * patches * patches


@dataclass(frozen=True, slots=True)
class ClipLoad:
    """Cost of a clip: number of units, cost per unit."""

    units: int
    unit_cost: int

    def __post_init__(self):
        if self.units < 1 or self.unit_cost < 1:
            raise ValueError(
                f"a clip needs at least 1 unit of cost 1, got units={self.units}, unit_cost={self.unit_cost}; "
                "remove clips without frames from the batch"
            )


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units `first` to `last` (exclusive) of the clip with index `clip`."""

    clip: int
    first: int
    last: int

    @property
    def units(self) -> int:
        return self.last - self.first


def shard(loads: Sequence[ClipLoad], ranks: int, step: int = 1) -> list[list[UnitRange]]:
    """Return the unit ranges of each rank, in clip order, with the smallest possible maximum load.

    A limit of total / ranks + heaviest step always suffices: every shard closed at it exceeds total / ranks.
    """
    if ranks < 1 or step < 1:
        raise ValueError(f"ranks and step must be at least 1, got ranks={ranks}, step={step}")
    if not loads:
        return [[] for _ in range(ranks)]
    total = sum(load.units * load.unit_cost for load in loads)
    heaviest = max(min(step, load.units) * load.unit_cost for load in loads)
    low, high = max(heaviest, -(-total // ranks)), total // ranks + heaviest
    while low < high:
        middle = (low + high) // 2
        if len(_fill(loads, middle, step)) <= ranks:
            high = middle
        else:
            low = middle + 1
    shards = _fill(loads, low, step)
    return shards + [[] for _ in range(ranks - len(shards))]


def cost(runs: Sequence[UnitRange], loads: Sequence[ClipLoad]) -> int:
    """Return the cost of one shard."""
    return sum(run.units * loads[run.clip].unit_cost for run in runs)


def pool_size(work_s: float, within_s: float, ranks: int) -> int:
    """Return the smallest number of ranks that encode ahead in time (DistTrain, arXiv 2408.04275); all if unknown.

    Example: 10 s of work during steps of 5 s need 3 ranks.
    """
    if not work_s or not within_s:
        return ranks
    return min(ranks, math.ceil(work_s / (USABLE_TIME_SHARE * within_s)))


def _fill(loads: Sequence[ClipLoad], limit: int, step: int) -> list[list[UnitRange]]:
    """Fill shards in order, each up to `limit`, which is at least the heaviest step."""
    shards: list[list[UnitRange]] = [[]]
    room = limit
    for clip, load in enumerate(loads):
        first = 0
        while first < load.units:
            fits = room // load.unit_cost
            units = load.units - first if fits >= load.units - first else fits // step * step
            if not units:
                shards.append([])
                room = limit
                continue
            shards[-1].append(UnitRange(clip, first, first + units))
            room -= units * load.unit_cost
            first += units
    return shards
