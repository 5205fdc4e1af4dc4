"""A plan for ranks that wait for each other in every micro-batch while some share units: columns of micro-batches.

Role: the trainer group asks for it under ZeRO 2 and 3; pure. All ranks run a column at the same time, and it takes as
long as its slowest micro-batch: so it should hold micro-batches that take about as long, whatever their degrees.
Invariants: every unit is in one column, on as many consecutive, aligned ranks as its degree; a micro-batch has units of
one degree, and keeps within the budget unless it is one unit; every rank has as many micro-batches, some without rows.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rlfuse.engines.trainer.degrees import EVEN, WORTH, Costs, Share, Unit, degrees_to_try, even_end, plan
from rlfuse.engines.trainer.makespan import makespan


def plan_in_columns(
    units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs, most: int | None = None
) -> list[list[Share]]:
    """Shares as [rank][column]; arguments as of `plan`.

    Example: units of 80, 40 and 38 tokens on 4 ranks with a budget of 40 -> one column: the first on ranks 0 and 1,
    another on each of the others.
    """
    best, end, even = list[list[Share]](), math.inf, even_end(units, ranks, budget, degrees, costs)
    for tried in degrees_to_try(units, ranks, budget, degrees, costs):
        columns = _Columns(ranks, budget, costs, most)
        shares = columns.filled(units, tried)
        if (found := makespan(shares, units, costs, lockstep=True)) < WORTH * end:
            best, end = shares, found
        if end <= EVEN * even:
            break
    return best


class _Columns:
    """[column, rank]: when micro-batches end, their tokens, sequences and degree; the last column is empty."""

    def __init__(self, ranks: int, budget: int, costs: Costs, most: int | None):
        self._ranks, self._budget, self._costs, self._most = ranks, budget, costs, most
        self._ends = np.zeros((1, ranks))
        self._tokens, self._sequences, self._degrees = (np.zeros((1, ranks), dtype=np.int64) for _ in range(3))
        self._members: dict[tuple[int, int], list[Unit]] = defaultdict(list)

    def filled(self, units: Sequence[Unit], degrees: Sequence[int]) -> list[list[Share]]:
        """Long units first; those of degree 1 go to where they make no column longer, or to columns of their own."""
        seconds = [self._costs.seconds(unit, degree) for unit, degree in zip(units, degrees, strict=True)]
        order = sorted(range(len(units)), key=lambda i: (-degrees[i], -seconds[i], i))
        for i in order:
            if degrees[i] > 1:
                self._add(units[i], degrees[i], seconds[i])
        left = self._fill([units[i] for i in order if degrees[i] == 1])
        alone = plan(left, self._ranks, self._budget, (1,), self._costs, self._most, lockstep=True) if left else []
        return [[*mine, *more] for mine, more in zip(self._shares(), alone or [[]] * self._ranks, strict=True)]

    def _add(self, unit: Unit, degree: int, seconds: float) -> None:
        """To the column that it makes longer by least, and there to the fullest micro-batch."""
        firsts, last = range(0, self._ranks, degree), len(self._ends) - 1
        taken, most = self._degrees[:, ::degree], self._most or math.inf
        fits = (taken == 0) | (taken == degree)
        fits &= self._tokens[:, ::degree] + unit.tokens <= degree * self._budget
        fits &= self._sequences[:, ::degree] + len(unit.rows) <= most
        fits[last] = True
        rates = np.array([self._costs.rate(first, degree) for first in firsts])
        ends = self._ends[:, ::degree] + rates * (seconds + (taken == 0) * self._costs.start(degree))
        longer = np.where(fits, np.maximum(ends - self._ends.max(axis=1, keepdims=True), 0.0), np.inf)
        best = np.where(longer <= longer.min() * (1 + 1e-9), ends, -1.0)
        column, group = (int(each) for each in np.unravel_index(best.argmax(), best.shape))
        if column == last:
            for name in ("_ends", "_tokens", "_sequences", "_degrees"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 0))))
        mine = slice(group * degree, (group + 1) * degree)
        self._ends[column, mine], self._degrees[column, mine] = ends[column, group], degree
        self._tokens[column, mine] += unit.tokens
        self._sequences[column, mine] += len(unit.rows)
        self._members[column, group * degree].append(unit)

    def _fill(self, units: Sequence[Unit]) -> list[Unit]:
        """Each to who has most time left in a column; those for whom nobody has enough."""
        gaps = [
            (rate * self._costs.start(1) - longest, column, rank)
            for column, longest in enumerate(self._ends.max(axis=1)[:-1].tolist())
            for rank in np.flatnonzero(self._degrees[column] == 0).tolist()
            if longest > (rate := self._costs.rate(rank, 1)) * self._costs.start(1)
        ]
        heapq.heapify(gaps)
        left = []
        for unit in units:
            while gaps and not self._has_room(self._members[gaps[0][1:]], unit):
                heapq.heappop(gaps)
            gap, column, rank = gaps[0] if gaps else (0.0, 0, 0)
            needed = self._costs.rate(rank, 1) * self._costs.seconds(unit, 1)
            if needed > -gap:
                left.append(unit)
            else:
                heapq.heapreplace(gaps, (gap + needed, column, rank))
                self._members[column, rank].append(unit)
        return left

    def _has_room(self, members: Sequence[Unit], unit: Unit) -> bool:
        """Of degree 1."""
        if self._most is not None and sum(len(each.rows) for each in (*members, unit)) > self._most:
            return False
        return sum(each.tokens for each in (*members, unit)) <= self._budget

    def _shares(self) -> list[list[Share]]:
        shares = [[Share()] * (len(self._ends) - 1) for _ in range(self._ranks)]
        for (column, first), members in self._members.items():
            degree = int(self._degrees[column, first]) or 1
            share = Share(tuple(row for unit in members for row in unit.rows), degree)
            for rank in range(first, first + degree):
                shares[rank][column] = share
        return shares
