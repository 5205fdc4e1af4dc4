"""Packing of rows into micro-batches with sequence parallelism, from lengths and predicted times.

Pure. Rows become units (a row, or the responses to one prompt); units get a degree, ranks and a micro-batch. A
micro-batch of degree d is on d consecutive, aligned ranks; each rank runs higher degrees first, so collectives are in
the same order on all ranks; budgets hold unless one unit exceeds them at the highest degree.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby

from rlfuse.engines.trainer.micro_batches import balance, pack
from rlfuse.samples import MicroBatch, Row

_MAX_ATTEMPTS = 16  # candidate plans in which the longest units get more ranks
_TARGETS = (0.0, 1.0, 1.02, 1.05)  # end times for split units relative to a balanced plan; 0: as early as possible
CLOSE_ENOUGH = 1.02  # a plan this close to perfect balance ends the search
MIN_GAIN = 0.98  # a higher degree must reduce the time to this fraction: predictions are no more accurate
_EXCHANGE_FRACTION = 2 / 3  # communication relative to compute in passes with gradients, compared with those without


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that stay together, with their cost: one row, or several that share one copy of their prompt."""

    rows: tuple[int, ...]
    tokens: int
    pairs: float
    """Token pairs in attention."""


@dataclass(frozen=True, slots=True)
class Share:
    """Micro-batch of one rank; without rows if only other ranks have work."""

    rows: tuple[int, ...] = ()
    degree: int = 1


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time of each rank of a micro-batch in addition to its share of the work."""

    start: float = 0.0
    """Per micro-batch."""
    token: float = 0.0
    """Per token of the micro-batch, for the all-to-all of queries, keys, values and outputs in all layers."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost model of a pass, in units of the time of a token outside attention on a rank that computes alone."""

    pair: float = 0.0
    """Per token pair in attention."""
    overheads: Mapping[int, Overhead] = field(default_factory=dict)
    """By degree; 0 for degrees not listed."""
    slower: tuple[float, ...] = (1.0,)
    """Slowdown factors while 1, 2, ... ranks compute at once, the last one for all larger counts: on CPU hosts ranks
    may share cores."""
    rates: tuple[float, ...] = ()
    """Slowdown factor of each rank; empty: 1 for all."""

    def rate(self, first: int, width: int) -> float:
        """Return the slowdown factor of `width` consecutive ranks that wait for each other."""
        return max(self.rates[first : first + width], default=1.0)

    def start(self, degree: int) -> float:
        """Return the overhead of a micro-batch on each of its ranks."""
        return self.overheads.get(degree, Overhead()).start

    def seconds(self, unit: Unit, degree: int) -> float:
        """Return the predicted time on each of `degree` ranks if no other computes, without the micro-batch's
        overhead."""
        token = self.overheads.get(degree, Overhead()).token
        return (unit.tokens + self.pair * unit.pairs) / degree + token * unit.tokens

    def contention(self, ranks: int) -> float:
        """Return the slowdown factor while this many ranks compute at once."""
        return self.slower[min(ranks, len(self.slower)) - 1]

    def end(self, loads: Sequence[float]) -> float:
        """Return when the last rank ends, given each rank's time alone; ranks speed up as others end."""
        end = before = 0.0
        for computing, load in zip(range(len(loads), 0, -1), sorted(loads), strict=True):
            end += (load - before) * self.contention(computing)
            before = load
        return end

    def even(self, work: float, ranks: int) -> float:
        """Return the end time of this much work, if it could be divided perfectly over the ranks."""
        speeds = accumulate(sorted((1 / self.rate(rank, 1) for rank in range(ranks)), reverse=True))
        return work * min(self.contention(count) / speed for count, speed in enumerate(speeds, 1))

    def trained(self) -> Costs:
        """Return the costs of passes with gradients: three times the compute and twice the communication."""
        whole = self.start(1)
        overheads = {
            degree: Overhead(whole + _EXCHANGE_FRACTION * (each.start - whole), _EXCHANGE_FRACTION * each.token)
            for degree, each in self.overheads.items()
        }
        return replace(self, overheads=overheads)


def degrees_up_to(largest: int) -> tuple[int, ...]:
    """Return the powers of two up to `largest`, which the configuration checks have validated."""
    return tuple(1 << power for power in range(largest.bit_length()))


def unit_per_row(rows: Sequence[Row]) -> list[Unit]:
    """Return one unit per row, each with its own copy of the prompt."""
    return [Unit((i,), row.tokens, row.tokens**2 / 2) for i, row in enumerate(rows)]


def units_by_prompt(rows: Sequence[Row], capacity: int, ranks: int, most: int | None = None) -> list[Unit]:
    """Group rows of the same prompt into units, so that the prompt is computed once.

    A prompt gets several units only if its responses exceed `capacity` tokens or `most` sequences, or if they exceed
    both a rank's even share of all tokens and the prompt's length.
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
    """Return shares as [rank][micro-batch]; in `lockstep` every rank gets equally many, some without rows.

    `budget`: maximum tokens of a micro-batch on one rank; `degrees`: ascending; `most`: maximum sequences of a
    micro-batch. ValueError for lockstep at degrees above 1, which needs `plan_lockstep`.
    Example: units of 90 and 8 tokens on 2 ranks with a budget of 50 and degrees 1, 2 -> the long one on both ranks,
    then the short one on rank 0.
    """
    if lockstep and degrees[-1] > 1:
        raise ValueError(f"degrees={degrees} in lockstep: plan_lockstep must be used.")
    costs = costs or Costs()
    placed = _best_placement(units, ranks, budget, degrees, costs)
    chosen, first = placed.degrees, placed.first
    units_at: dict[tuple[int, int], list[Unit]] = defaultdict(list)
    for unit, degree, rank in zip(units, chosen, first, strict=True):
        units_at[degree, rank].append(unit)
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    for degree in reversed(degrees):
        for group in range(0, ranks, degree):
            mine = units_at[degree, group]
            counts = [len(unit.rows) for unit in mine]
            for bin in pack([unit.tokens for unit in mine], budget * degree, most, counts):
                share = Share(tuple(row for i in bin for row in mine[i].rows), degree)
                for rank in range(group, group + degree):
                    shares[rank].append(share)
    if not lockstep:
        return shares
    longest = max(map(len, shares))
    return [_lockstep_shares(mine, units_at[1, rank], longest, budget, most) for rank, mine in enumerate(shares)]


def _lockstep_shares(mine: list[Share], alone: list[Unit], count: int, budget: int, most: int | None) -> list[Share]:
    """Return a rank's shares in `count` micro-batches, balanced if the budget allows; those without rows come last."""
    bins = [[alone[i] for i in bin] for bin in balance([unit.tokens for unit in alone], count) if bin]
    if all(len(bin) == 1 or _fits(bin, budget, most) for bin in bins):
        bins.sort(key=lambda bin: -sum(unit.tokens for unit in bin))
        mine = [Share(tuple(row for unit in bin for row in unit.rows)) for bin in bins]
    return mine + [Share()] * (count - len(mine))


def _fits(bin: Sequence[Unit], budget: int, most: int | None) -> bool:
    return sum(unit.tokens for unit in bin) <= budget and (most is None or sum(len(u.rows) for u in bin) <= most)


def fill(shares: Sequence[Sequence[Share]], rows: Sequence[Row]) -> list[list[MicroBatch]]:
    """Return the shares as micro-batches of `rows`; an empty share becomes a filler of two tokens with weight 0."""
    filler = filler_like(rows[0])
    return [
        [MicroBatch(tuple(rows[i] for i in each.rows), degree=each.degree) if each.rows else filler for each in mine]
        for mine in shares
    ]


def filler_like(row: Row) -> MicroBatch:
    """Return a micro-batch of two tokens with weight 0 and the arrays of `row`."""
    first = {name: array[:1] for name, array in row.tensors.items()}
    ids = {"prompt_ids": row.prompt_ids[-1:], "response_ids": row.response_ids[:1]}
    return MicroBatch((replace(row, **ids, tensors=first, visual=(), trainable=None),), weight=0.0)


@dataclass(frozen=True, slots=True)
class _Placement:
    """Assignment of units to ranks, and its end time."""

    end: float
    degrees: list[int]
    first: list[int]
    """First rank of each unit."""


def _best_placement(units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs) -> _Placement:
    """Return the best placement found; degrees above the smallest that fit must reduce the time by `MIN_GAIN`."""
    even, best = balanced_time(units, ranks, budget, degrees, costs), _Placement(math.inf, [], [])
    for tried in candidate_degrees(units, ranks, budget, degrees, costs):
        for target in _TARGETS if max(tried, default=1) > 1 else _TARGETS[:1]:
            found = _assign(units, tried, ranks, budget, costs, target * even)
            if found.end < best.end * (1.0 if tried == best.degrees else MIN_GAIN):
                best = found
            if best.end <= CLOSE_ENOUGH * even:
                return best
    return best


def _smallest_degrees(units: Sequence[Unit], budget: int, degrees: Sequence[int]) -> list[int]:
    return [next((d for d in degrees if unit.tokens <= d * budget), degrees[-1]) for unit in units]


def balanced_time(units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs) -> float:
    """Return the end time of units at the smallest degrees that fit, if they could be divided perfectly."""
    smallest = _smallest_degrees(units, budget, degrees)
    return costs.even(sum(costs.seconds(*each) * each[1] for each in zip(units, smallest, strict=True)), ranks)


def candidate_degrees(
    units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs
) -> Iterator[list[int]]:
    """Yield candidate degrees: the smallest that fit; higher ones for units long enough to unbalance a plan, raised
    step by step from the longest; and each degree as the minimum for all units."""
    smallest = _smallest_degrees(units, budget, degrees)
    shortest = (CLOSE_ENOUGH - 1) * balanced_time(units, ranks, budget, degrees, costs)
    tried, raises = list(smallest), list[int]()
    longest: list[tuple[float, int, int]] = []  # -seconds, unit, degree

    def wait(i: int, degree: int) -> None:
        seconds = costs.seconds(units[i], degree)
        if degree < degrees[-1] and seconds + costs.start(degree) > shortest:
            heapq.heappush(longest, (-seconds, i, degree))

    yield list(tried)
    for i, degree in enumerate(tried):
        wait(i, degree)
    while longest:
        _, i, degree = heapq.heappop(longest)
        raises.append(i)
        wait(i, 2 * degree)
    at_once = math.ceil(len(raises) / _MAX_ATTEMPTS)
    for begin in range(0, len(raises), at_once or 1):
        for i in raises[begin : begin + at_once]:
            tried[i] *= 2
        yield list(tried)
    yield from ([max(degree, least) for least in smallest] for degree in degrees[1:])


def _assign(
    units: Sequence[Unit], degrees: Sequence[int], ranks: int, budget: int, costs: Costs, target: float = 0.0
) -> _Placement:
    """Assign units, highest degrees and longest first, each to the ranks that end it first; ranks that share a unit are
    equally loaded before it, so none waits for the others.

    A split unit goes to the most loaded ranks that end it by `target`, if any: this packs few long units better
    (MULTIFIT, Coffman et al. 1978), and short units level the rest.
    """
    loads, first = [0.0] * ranks, [0] * len(units)
    seconds = [costs.seconds(unit, degree) for unit, degree in zip(units, degrees, strict=True)]
    order = sorted(range(len(units)), key=lambda i: (-degrees[i], -seconds[i], i))
    for width, same_degree in groupby(order, key=lambda i: degrees[i]):
        ends_by_rate: dict[float, list[tuple[float, int]]] = defaultdict(list)  # rate -> sorted (end, rank)
        for rank in range(0, ranks, width):
            insort(ends_by_rate[costs.rate(rank, width)], (loads[rank], rank))
        room = dict.fromkeys(range(0, ranks, width), 0)  # tokens that the last micro-batch still takes
        for i in same_degree:
            rate, place = _choose_ranks(ends_by_rate, seconds[i], target if width > 1 else 0.0)
            end, at = ends_by_rate[rate].pop(place)
            end += rate * seconds[i]
            if room[at] < units[i].tokens:
                end, room[at] = end + rate * costs.start(width), budget * width
            room[at] -= units[i].tokens
            insort(ends_by_rate[rate], (end, at))
            first[i] = at
        for end, at in chain(*ends_by_rate.values()):
            loads[at : at + width] = [end] * width
    return _Placement(costs.end(loads), list(degrees), first)


def _choose_ranks(
    ends_by_rate: Mapping[float, Sequence[tuple[float, int]]], seconds: float, target: float
) -> tuple[float, int]:
    """Return (rate, index in its list) of the rank for a unit: the last to end it by `target`, else the first to end
    it."""
    in_time, soonest = [], []
    for rate, ends in ends_by_rate.items():
        soonest.append((ends[0][0] + rate * seconds, ends[0][1], rate, 0))
        if place := bisect_right(ends, (target - rate * seconds, math.inf)):
            in_time.append((ends[place - 1][0] + rate * seconds, ends[place - 1][1], rate, place - 1))
    return (max(in_time) if in_time else min(soonest))[2:]
