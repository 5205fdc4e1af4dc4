"""Shard the clips of a batch over ranks: contiguous, balanced, cut only where the tower's bits do not change. Pure.

Clips are cut at multiples of `step` units (temporal patches), since a matrix product may differ in its last bits with
its number of rows. The heaviest shard is as light as any contiguous cut allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

USABLE_TIME_SHARE = 0.8
"""Of the time that there is, in which clips are encoded ahead: clips and steps differ."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Multiply-adds of the tower for one unit, from its patch count: projections and MLP are linear in it, attention
    quadratic where it spans the unit (attention in windows of fixed size is linear)."""

    per_patch: int
    per_pair: int

    def unit(self, patches: int) -> int:
        return self.per_patch * patches + self.per_pair * patches * patches


@dataclass(frozen=True, slots=True)
class ClipLoad:
    """A clip as the sharding sees it."""

    units: int
    unit_cost: int

    def __post_init__(self):
        if self.units < 1 or self.unit_cost < 1:
            raise ValueError(
                f"a clip needs at least 1 unit of cost 1, got units={self.units}, unit_cost={self.unit_cost}; "
                "leave clips without frames out of the batch"
            )


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units `first` to `last` (exclusive) of the batch's clip number `clip`."""

    clip: int
    first: int
    last: int

    @property
    def units(self) -> int:
        return self.last - self.first


def shard(loads: Sequence[ClipLoad], ranks: int, step: int = 1) -> list[list[UnitRange]]:
    """Return one list of runs per rank, in the order of the clips, with the smallest possible maximum load. A rank
    closed at total / ranks + heaviest step holds more than total / ranks, so `ranks` of them always suffice."""
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
    """Of one shard."""
    return sum(run.units * loads[run.clip].unit_cost for run in runs)


def pool_size(work_s: float, within_s: float, ranks: int) -> int:
    """Return how few ranks encode ahead in time (DistTrain, arXiv 2408.04275); all if a rate is unknown. 10 s of work
    beside steps of 5 s: 3 ranks."""
    if not work_s or not within_s:
        return ranks
    return min(ranks, math.ceil(work_s / (USABLE_TIME_SHARE * within_s)))


def _fill(loads: Sequence[ClipLoad], limit: int, step: int) -> list[list[UnitRange]]:
    """Fill shards of at most `limit` (at least the heaviest step), one after the other."""
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
