"""How many ranks share a sequence, and which: a plan of every rank's micro-batches from lengths and predicted time.

Role: called before every pass; pure. Rows become units (a row, or the answers to one prompt), units get a degree of
sequence parallelism, ranks and micro-batches. Invariants: a row is in one micro-batch; one of degree d is on d
consecutive, aligned ranks; each rank runs higher degrees first, so that ranks meet in one order; budgets hold unless
one unit exceeds them at the highest degree. A unit goes to the rank that ends it first; ranks in lockstep run equally
many.
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

_MAX_ATTEMPTS = 16  # attempts to speed a plan up by giving its longest units more ranks
_TARGETS = (0.0, 1.0, 1.02, 1.05)  # of the time of a perfectly even plan: when what is cut is to be done; 0: soon
CLOSE_ENOUGH = 1.02  # a plan this close to perfectly even is not worth any
MIN_GAIN = 0.98  # more ranks must end the pass this much sooner: predictions are no better
_EXCHANGE_FRACTION = 2 / 3  # to work, of passes with gradients relative to those without


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
class Overhead:
    """What each rank of a micro-batch takes beyond its share of the work."""

    start: float = 0.0
    """Whatever is in it."""
    token: float = 0.0
    """For each of its tokens: queries, keys, values and outputs change ranks in all layers."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of a pass in units of what a token takes outside attention on a rank that computes alone."""

    pair: float = 0.0
    """A pair of tokens in attention."""
    overheads: Mapping[int, Overhead] = field(default_factory=dict)
    """By degree; none for others."""
    slower: tuple[float, ...] = (1.0,)
    """How many times longer everything takes while 1, 2, ... ranks compute at once, and more than are named as the
    last: on CPU hosts ranks may share cores."""
    rates: tuple[float, ...] = ()
    """By rank: how many times longer than expected everything takes there; none: as expected everywhere."""

    def rate(self, first: int, width: int) -> float:
        """Of consecutive ranks that wait for each other."""
        return max(self.rates[first : first + width], default=1.0)

    def start(self, degree: int) -> float:
        """Of a micro-batch, on each of its ranks."""
        return self.overheads.get(degree, Overhead()).start

    def seconds(self, unit: Unit, degree: int) -> float:
        """Predicted time on each of `degree` ranks, if no other computes; without the micro-batch's start."""
        token = self.overheads.get(degree, Overhead()).token
        return (unit.tokens + self.pair * unit.pairs) / degree + token * unit.tokens

    def contention(self, ranks: int) -> float:
        """How many times longer everything takes while so many ranks compute at once."""
        return self.slower[min(ranks, len(self.slower)) - 1]

    def end(self, loads: Sequence[float]) -> float:
        """When the last rank is done with what it would take alone; who has less makes room for the others."""
        end = before = 0.0
        for computing, load in zip(range(len(loads), 0, -1), sorted(loads), strict=True):
            end += (load - before) * self.contention(computing)
            before = load
        return end

    def even(self, work: float, ranks: int) -> float:
        """When ranks would be done with so much work for one as expected, if it could be shared out to the token."""
        speeds = accumulate(sorted((1 / self.rate(rank, 1) for rank in range(ranks)), reverse=True))
        return work * min(self.contention(count) / speed for count, speed in enumerate(speeds, 1))

    def trained(self) -> Costs:
        """Of passes with gradients: three times the work, and as many exchanges on the way back as on the way there."""
        whole = self.start(1)
        overheads = {
            degree: Overhead(whole + _EXCHANGE_FRACTION * (each.start - whole), _EXCHANGE_FRACTION * each.token)
            for degree, each in self.overheads.items()
        }
        return replace(self, overheads=overheads)


def degrees_up_to(largest: int) -> tuple[int, ...]:
    """Degrees up to the largest, which `checks` found to divide ranks and heads."""
    return tuple(1 << power for power in range(largest.bit_length()))


def unit_per_row(rows: Sequence[Row]) -> list[Unit]:
    """Every row with its own copy of its prompt."""
    return [Unit((i,), row.tokens, row.tokens**2 / 2) for i, row in enumerate(rows)]


def units_by_prompt(rows: Sequence[Row], capacity: int, ranks: int, most: int | None = None) -> list[Unit]:
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

    ValueError for lockstep at degrees above 1, where `columns` plans.
    `budget`: tokens of a micro-batch on one rank, the memory limit; `degrees` ascend.
    Example: units of 90 and 8 tokens on 2 ranks with a budget of 50 and degrees 1, 2 -> the long one on both ranks,
    then the short one on rank 0.
    """
    if lockstep and degrees[-1] > 1:
        raise ValueError(f"degrees={degrees} in lockstep: plan_lockstep plans that.")
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
    """A rank's shares in `count` micro-batches, since ranks wait for each other in each: spread evenly where that fits;
    those without rows come last."""
    bins = [[alone[i] for i in bin] for bin in balance([unit.tokens for unit in alone], count) if bin]
    if all(len(bin) == 1 or _fits(bin, budget, most) for bin in bins):
        bins.sort(key=lambda bin: -sum(unit.tokens for unit in bin))
        mine = [Share(tuple(row for unit in bin for row in unit.rows)) for bin in bins]
    return mine + [Share()] * (count - len(mine))


def _fits(bin: Sequence[Unit], budget: int, most: int | None) -> bool:
    return sum(unit.tokens for unit in bin) <= budget and (most is None or sum(len(u.rows) for u in bin) <= most)


def fill(shares: Sequence[Sequence[Share]], rows: Sequence[Row]) -> list[list[MicroBatch]]:
    """The shares with their rows; one without runs two tokens of a row at weight 0, which costs next to nothing."""
    row, first = rows[0], {name: array[:1] for name, array in rows[0].tensors.items()}
    short = replace(
        row, prompt_ids=row.prompt_ids[-1:], response_ids=row.response_ids[:1], tensors=first, visual=(), trainable=None
    )
    filler = MicroBatch((short,), weight=0.0)
    return [
        [MicroBatch(tuple(rows[i] for i in each.rows), degree=each.degree) if each.rows else filler for each in mine]
        for mine in shares
    ]


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where units run, and when the last rank ends."""

    end: float
    degrees: list[int]
    first: list[int]
    """Rank of each unit."""


def _best_placement(units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs) -> _Placement:
    """The smallest degrees that fit, raised where that ends the pass clearly sooner."""
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
    """When units at the smallest degrees that fit would end, if they could be shared out to the token."""
    smallest = _smallest_degrees(units, budget, degrees)
    return costs.even(sum(costs.seconds(*each) * each[1] for each in zip(units, smallest, strict=True)), ranks)


def candidate_degrees(
    units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs
) -> Iterator[list[int]]:
    """The smallest that fit; more for the longest units, one after the other or several at a time, as far as a unit
    with its start can make a plan uneven; and one degree for all."""
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
    """High degrees first, the longest to who would end it first: ranks that share a unit are equally loaded before it,
    so none waits for the others.

    What is cut goes to the fullest that would end it by `target`, if there is one: few long units share ranks out
    better that way (MULTIFIT, Coffman et al. 1978), and short ones level what is left.
    """
    loads, first = [0.0] * ranks, [0] * len(units)
    seconds = [costs.seconds(unit, degree) for unit, degree in zip(units, degrees, strict=True)]
    order = sorted(range(len(units)), key=lambda i: (-degrees[i], -seconds[i], i))
    for width, same_degree in groupby(order, key=lambda i: degrees[i]):
        ends_by_rate: dict[float, list[tuple[float, int]]] = defaultdict(list)  # of ranks at one rate: when each ends
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
    """(rate, place in its list) of who gets a unit: the last to end it by `target`, or else the first to end it."""
    in_time, soonest = [], []
    for rate, ends in ends_by_rate.items():
        soonest.append((ends[0][0] + rate * seconds, ends[0][1], rate, 0))
        if place := bisect_right(ends, (target - rate * seconds, math.inf)):
            in_time.append((ends[place - 1][0] + rate * seconds, ends[place - 1][1], rate, place - 1))
    return (max(in_time) if in_time else min(soonest))[2:]
