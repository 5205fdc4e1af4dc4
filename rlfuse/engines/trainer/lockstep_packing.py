"""Packing of micro-batches for ranks in lockstep with sequence parallelism, as columns of concurrent micro-batches.

Pure. A column takes as long as its slowest micro-batch, so it gets micro-batches of similar time and any degree; short
units fill the gaps. A unit is in one column, on as many consecutive, aligned ranks as its degree; every rank has
equally many micro-batches, some without rows.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from rlfuse.engines.trainer.makespan import makespan
from rlfuse.engines.trainer.sequence_parallel_packing import (
    CLOSE_ENOUGH,
    MIN_GAIN,
    Costs,
    Share,
    Unit,
    balanced_time,
    candidate_degrees,
    plan,
)

_GROWTH_LIMITS = (math.inf, 0.1, 0.0)  # candidates: few units fill few columns, many fill columns of similar length


def plan_lockstep(
    units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs, most: int | None = None
) -> list[list[Share]]:
    """Return shares as [rank][column]; arguments as of `plan`.

    Example: units of 80, 40 and 38 tokens on 4 ranks with a budget of 40 -> one column: the first on ranks 0 and 1,
    the others on ranks 2 and 3.
    """
    best, end, chosen = list[list[Share]](), math.inf, list[int]()
    even = balanced_time(units, ranks, budget, degrees, costs)
    rates = {d: np.array([costs.rate(first, d) for first in range(0, ranks, d)]) for d in sorted({1, *degrees})}
    for tried in candidate_degrees(units, ranks, budget, degrees, costs):
        for growth in _GROWTH_LIMITS:
            limit = end * (1.0 if tried == chosen else MIN_GAIN)
            shares = _Columns(rates, budget, costs, most).pack_units(units, tried, growth, limit)
            if shares and (found := makespan(shares, units, costs, lockstep=True)) < limit:
                best, end, chosen = shares, found, tried
        if end <= CLOSE_ENOUGH * even:
            break
    return best


class _Columns:
    """Columns under construction, as [column, rank] arrays: end time, tokens, sequences and degree; the last is
    empty."""

    def __init__(self, rates: Mapping[int, np.ndarray], budget: int, costs: Costs, most: int | None):
        """Start without columns. `rates`: degree -> relative duration of each group of that many ranks."""
        self._rates, self._budget, self._costs, self._most = rates, budget, costs, most
        self._ranks = ranks = len(rates[1])
        self._ends = np.zeros((1, ranks))
        self._tokens, self._sequences, self._degrees = (np.zeros((1, ranks), dtype=np.int64) for _ in range(3))
        self._members: dict[tuple[int, int], list[Unit]] = defaultdict(list)

    def pack_units(
        self, units: Sequence[Unit], degrees: Sequence[int], growth: float, limit: float
    ) -> list[list[Share]]:
        """Return shares as [rank][column]; empty if units of degree above 1 alone reach `limit`.

        Units of higher degree are placed first; those of degree 1 fill gaps without extending a column, and the rest
        get columns of their own. `growth`: maximum relative growth of a column by a unit.
        """
        seconds = [self._costs.seconds(unit, degree) for unit, degree in zip(units, degrees, strict=True)]
        order = sorted(range(len(units)), key=lambda i: (-degrees[i], -seconds[i], i))
        for i in order:
            if degrees[i] > 1:
                self._add(units[i], degrees[i], seconds[i], growth)
        if self._ends.max(axis=1).sum() >= limit:
            return []
        left = [units[i] for i in order if degrees[i] == 1]
        for degree in self._rates:
            left = self._fill(left, degree)
        alone = plan(left, self._ranks, self._budget, (1,), self._costs, self._most, lockstep=True) if left else []
        return [[*mine, *more] for mine, more in zip(self._shares(), alone or [[]] * self._ranks, strict=True)]

    def _add(self, unit: Unit, degree: int, seconds: float, growth: float) -> None:
        """Add a unit to the column it extends least, in the fullest micro-batch there."""
        last, rates = len(self._ends) - 1, self._rates[degree]
        taken, most = self._degrees[:, ::degree], self._most or math.inf
        fits = (taken == 0) | (taken == degree)
        fits &= self._tokens[:, ::degree] + unit.tokens <= degree * self._budget
        fits &= self._sequences[:, ::degree] + len(unit.rows) <= most
        fits[last] = True
        ends = self._ends[:, ::degree] + rates * (seconds + (taken == 0) * self._costs.start(degree))
        longest = self._ends.max(axis=1, keepdims=True)
        fits[:last] &= ends[:last] <= (1 + growth) * longest[:last]
        longer = np.where(fits, np.maximum(ends - longest, 0.0), np.inf)
        best = np.where(longer <= longer.min() * (1 + 1e-9), ends, -1.0)
        column, group = (int(each) for each in np.unravel_index(best.argmax(), best.shape))
        if column == last:
            for name in ("_ends", "_tokens", "_sequences", "_degrees"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 0))))
        self._put(unit, degree, column, group * degree, ends[column, group])

    def _fill(self, units: Sequence[Unit], degree: int) -> list[Unit]:
        """Add units of degree 1 to the micro-batches of `degree` with the largest gaps; return those that do not fit.

        A short unit added to a split micro-batch is split as well, which leaves no rank of the column idle.
        """
        longest, rates, gaps = self._ends.max(axis=1).tolist(), self._rates[degree].tolist(), []
        for column, first in product(range(len(self._ends) - 1), range(0, self._ranks, degree)):
            taken = int(self._degrees[column, first])
            if taken == degree or (taken == 0 and degree == 1):
                end = float(self._ends[column, first]) if taken else rates[first] * self._costs.start(1)
                gaps.append((end - longest[column], column, first))
        heapq.heapify(gaps)
        left = []
        for unit in units:
            while gaps and not self._has_room(unit, degree, *gaps[0][1:]):
                heapq.heappop(gaps)
            gap, column, first = gaps[0] if gaps else (0.0, 0, 0)
            after = gap + rates[first // degree] * self._costs.seconds(unit, degree)
            if after > 0:
                left.append(unit)
            else:
                heapq.heapreplace(gaps, (after, column, first))
                self._put(unit, degree, column, first, longest[column] + after)
        return left

    def _has_room(self, unit: Unit, degree: int, column: int, first: int) -> bool:
        """Return whether the micro-batch has room for the unit."""
        if self._most is not None and self._sequences[column, first] + len(unit.rows) > self._most:
            return False
        return self._tokens[column, first] + unit.tokens <= degree * self._budget

    def _put(self, unit: Unit, degree: int, column: int, first: int, end: float) -> None:
        """Add a unit to a micro-batch that then ends at `end`."""
        mine = slice(first, first + degree)
        self._ends[column, mine], self._degrees[column, mine] = end, degree
        self._tokens[column, mine] += unit.tokens
        self._sequences[column, mine] += len(unit.rows)
        self._members[column, first].append(unit)

    def _shares(self) -> list[list[Share]]:
        shares = [[Share()] * (len(self._ends) - 1) for _ in range(self._ranks)]
        for (column, first), members in self._members.items():
            degree = int(self._degrees[column, first])
            share = Share(tuple(row for unit in members for row in unit.rows), degree)
            for rank in range(first, first + degree):
                shares[rank][column] = share
        return shares
