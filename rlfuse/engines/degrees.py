"""How many ranks share a sequence, and which: a plan of every rank's micro-batches from lengths and predicted time.

Role: called by the trainer group before every pass; pure. Rows become units (a row, or the answers to one prompt that
runs once), units get a degree of sequence parallelism, ranks and micro-batches.
Invariants: every row is in exactly one micro-batch; a micro-batch of degree d is given to d consecutive, aligned ranks;
each rank runs higher degrees first, so ranks that wait for each other meet in the same order everywhere; tokens per
rank keep within the budget unless one unit exceeds it at the highest degree; with one legal degree and no costs the
plan is that of `batching.micro_batches`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rlfuse.engines.batching import pack
from rlfuse.samples import Row

_RAISES = 64  # attempts to speed a plan up by giving its longest unit more ranks
_EVEN = 1.05  # a plan this close to perfectly even is not worth any
_WORTH = 0.9  # more ranks must end the pass this much sooner: predictions are no better


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that run together, and what they cost: one row, or several behind the one copy of their prompt."""

    rows: tuple[int, ...]
    tokens: int
    pairs: float
    """Pairs of tokens that attention looks at."""


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch as one rank sees it; no rows where only the other ranks have work."""

    rows: tuple[int, ...] = ()
    degree: int = 1


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of a pass in units of what a token takes outside attention on one rank."""

    pair: float = 0.0
    """A pair of tokens in attention."""
    exchange: float = 0.0
    """Sending a token's queries, keys, values and outputs to another rank, in all layers."""
    start: float = 0.0
    """Starting the exchanges of a micro-batch."""

    def seconds(self, unit: Unit, degree: int) -> float:
        """Predicted time on each of `degree` ranks."""
        work = (unit.tokens + self.pair * unit.pairs) / degree
        if degree == 1:
            return work
        return work + self.start + self.exchange * unit.tokens / degree * (1 - 1 / degree)


def legal(largest: int) -> tuple[int, ...]:
    """Degrees up to the largest, which `checks` found to divide ranks and heads."""
    return tuple(1 << power for power in range(largest.bit_length()))


def alone(rows: Sequence[Row]) -> list[Unit]:
    """Every row with its own copy of its prompt."""
    return [Unit((i,), row.tokens, row.tokens**2 / 2) for i, row in enumerate(rows)]


def together(rows: Sequence[Row], capacity: int, ranks: int, most: int | None = None) -> list[Unit]:
    """Rows of the same prompt in one unit, so that it runs once.

    A prompt is run again only where its answers don't fit `capacity` tokens or `most` sequences, or where they are more
    than a rank's fair share of all tokens and than the prompt.
    """
    families: dict[object, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        families[row.prompt_key].append(i)
    answers = sum(len(row.response_ids) for row in rows)
    fair = math.ceil((answers + sum(len(rows[each[0]].prompt_ids) for each in families.values())) / ranks)
    units = []
    for family in families.values():
        prompt, lengths = len(rows[family[0]].prompt_ids), [len(rows[i].response_ids) for i in family]
        room = min(capacity - prompt, max(fair, prompt))
        for bin in pack(lengths, room, most):
            sizes = [lengths[i] for i in bin]
            pairs = prompt**2 / 2 + sum(size * (prompt + size / 2) for size in sizes)
            units.append(Unit(tuple(family[i] for i in bin), prompt + sum(sizes), pairs))
    return units


def plan(
    units: Sequence[Unit],
    ranks: int,
    budget: int,
    degrees: Sequence[int] = (1,),
    costs: Costs | None = None,
    most: int | None = None,
    lockstep: bool = False,
) -> list[list[Share]]:
    """Shares as [rank][micro-batch]; in `lockstep` every rank gets as many, some without rows.

    `budget`: tokens of a micro-batch on one rank, the memory limit; `degrees` ascend.
    Example: units of 90 and 8 tokens on 2 ranks with a budget of 50 and degrees 1, 2 -> the long one on both ranks,
    then the short one on rank 0.
    """
    costs = costs or Costs()
    chosen = _degrees(units, ranks, budget, degrees, costs)
    _, first = _place(units, chosen, ranks, costs)
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    for degree in reversed(degrees):
        for group in range(0, ranks, degree):
            mine = [units[i] for i in range(len(units)) if (chosen[i], first[i]) == (degree, group)]
            counts = [len(unit.rows) for unit in mine]
            for bin in pack([unit.tokens for unit in mine], budget * degree, most, counts):
                share = Share(tuple(row for i in bin for row in mine[i].rows), degree)
                for rank in range(group, group + degree):
                    shares[rank].append(share)
    longest = max(map(len, shares)) if lockstep else 0
    return [share + [Share()] * (longest - len(share)) for share in shares]


def _degrees(units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs) -> list[int]:
    """The smallest that fit, raised for the longest units where that ends the pass clearly sooner."""
    tried = [next((d for d in degrees if unit.tokens <= d * budget), degrees[-1]) for unit in units]
    best, end = tried, _place(units, tried, ranks, costs)[0]
    for _ in range(_RAISES if len(degrees) > 1 else 0):
        seconds = [costs.seconds(unit, degree) for unit, degree in zip(units, best, strict=True)]
        raisable = [i for i, degree in enumerate(tried) if degree < degrees[-1]]
        if not raisable or end <= _EVEN * sum(s * d for s, d in zip(seconds, best, strict=True)) / ranks:
            break
        longest = max(raisable, key=lambda i: (costs.seconds(units[i], tried[i]), -i))
        tried = [2 * degree if i == longest else degree for i, degree in enumerate(tried)]
        if (sooner := _place(units, tried, ranks, costs)[0]) < _WORTH * end:
            best, end = tried, sooner
    return best


def _place(units: Sequence[Unit], degrees: Sequence[int], ranks: int, costs: Costs) -> tuple[float, list[int]]:
    """When the last rank ends, and each unit's first rank: high degrees first, the longest to the least loaded."""
    loads, first = [0.0] * ranks, [0] * len(units)
    seconds = [costs.seconds(unit, degree) for unit, degree in zip(units, degrees, strict=True)]
    for i in sorted(range(len(units)), key=lambda i: (-degrees[i], -seconds[i], i)):
        width = degrees[i]
        begin, at = min((max(loads[rank : rank + width]), rank) for rank in range(0, ranks, width))
        loads[at : at + width] = [begin + seconds[i]] * width
        first[i] = at
    return max(loads), first
