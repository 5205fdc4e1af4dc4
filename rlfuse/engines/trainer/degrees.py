"""How many ranks share a sequence, and which: a plan of every rank's micro-batches from lengths and predicted time.

Role: called by the trainer group before every pass; pure. Rows become units (a row, or the answers to one prompt that
runs once), units get a degree of sequence parallelism, ranks and micro-batches.
Invariants: every row is in exactly one micro-batch; a micro-batch of degree d is given to d consecutive, aligned ranks;
each rank runs higher degrees first, so ranks that wait for each other meet in the same order everywhere; tokens per
rank keep within the budget unless one unit exceeds it at the highest degree; with one legal degree and no costs ranks
are balanced by tokens (`micro_batches.balance`). A unit goes to who would end it first, so slow ranks get less; ranks
that wait for each other in every micro-batch run as many of them, and a slow one's are smaller.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from rlfuse.engines.trainer.micro_batches import balance, pack
from rlfuse.samples import MicroBatch, Row

_RAISES = 64  # attempts to speed a plan up by giving its longest unit more ranks
_EVEN = 1.02  # a plan this close to perfectly even is not worth any
_WORTH = 0.98  # more ranks must end the pass this much sooner: predictions are no better
_EXCHANGES = 2 / 3  # to work, of passes with gradients relative to those without


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

    def crowded(self, ranks: int) -> float:
        """How many times longer everything takes while so many ranks compute at once."""
        return self.slower[min(ranks, len(self.slower)) - 1]

    def end(self, loads: Sequence[float]) -> float:
        """When the last rank is done with what it would take alone; who has less makes room for the others."""
        end = before = 0.0
        for computing, load in zip(range(len(loads), 0, -1), sorted(loads), strict=True):
            end += (load - before) * self.crowded(computing)
            before = load
        return end

    def even(self, work: float, ranks: int) -> float:
        """When ranks would be done with so much work for one as expected, if it could be shared out to the token."""
        speeds = accumulate(sorted((1 / self.rate(rank, 1) for rank in range(ranks)), reverse=True))
        return work * min(self.crowded(count) / speed for count, speed in enumerate(speeds, 1))

    def trained(self) -> Costs:
        """Of passes with gradients: three times the work, and as many exchanges on the way back as on the way there."""
        whole = self.start(1)
        overheads = {
            degree: Overhead(whole + _EXCHANGES * (each.start - whole), _EXCHANGES * each.token)
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

    `budget`: tokens of a micro-batch on one rank, the memory limit; `degrees` ascend.
    Example: units of 90 and 8 tokens on 2 ranks with a budget of 50 and degrees 1, 2 -> the long one on both ranks,
    then the short one on rank 0.
    """
    costs = costs or Costs()
    chosen = _degrees(units, ranks, budget, degrees, costs)
    _, first = _assign(units, chosen, ranks, budget, costs)
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    for degree in reversed(degrees):
        for group in range(0, ranks, degree):
            mine = [units[i] for i in range(len(units)) if (chosen[i], first[i]) == (degree, group)]
            counts = [len(unit.rows) for unit in mine]
            for bin in pack([unit.tokens for unit in mine], budget * degree, most, counts):
                share = Share(tuple(row for i in bin for row in mine[i].rows), degree)
                for rank in range(group, group + degree):
                    shares[rank].append(share)
    if not lockstep:
        return shares
    longest, alone = max(map(len, shares)), [[] for _ in range(ranks)]
    for unit, degree, rank in zip(units, chosen, first, strict=True):
        alone[rank] += [unit] if degree == 1 else []
    return [_in_step(*mine, longest, budget, most) for mine in zip(shares, alone, strict=True)]


def _in_step(mine: list[Share], alone: list[Unit], count: int, budget: int, most: int | None) -> list[Share]:
    """A rank's shares in `count` micro-batches, since ranks wait for each other in each: what it computes alone is
    spread evenly where that fits; those without rows come last."""
    together = [share for share in mine if share.degree > 1]
    spread = balance([unit.tokens for unit in alone], count - len(together))
    bins = [[alone[i] for i in bin] for bin in spread if bin]
    if all(len(bin) == 1 or _fits(bin, budget, most) for bin in bins):
        bins.sort(key=lambda bin: -sum(unit.tokens for unit in bin))
        mine = together + [Share(tuple(row for unit in bin for row in unit.rows)) for bin in bins]
    return mine + [Share()] * (count - len(mine))


def _fits(bin: Sequence[Unit], budget: int, most: int | None) -> bool:
    return sum(unit.tokens for unit in bin) <= budget and (most is None or sum(len(u.rows) for u in bin) <= most)


def fill(shares: Sequence[Sequence[Share]], rows: Sequence[Row]) -> list[list[MicroBatch]]:
    """The shares with their rows; one without runs two tokens of a row at weight 0, which costs next to nothing."""
    row, first = rows[0], {name: array[:1] for name, array in rows[0].tensors.items()}
    short = replace(row, prompt_ids=row.prompt_ids[-1:], response_ids=row.response_ids[:1], tensors=first, visual=())
    filler = MicroBatch((short,), weight=0.0)
    return [
        [MicroBatch(tuple(rows[i] for i in each.rows), degree=each.degree) if each.rows else filler for each in mine]
        for mine in shares
    ]


def _degrees(units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs) -> list[int]:
    """The smallest that fit, raised for the longest units where that ends the pass clearly sooner."""
    tried = [next((d for d in degrees if unit.tokens <= d * budget), degrees[-1]) for unit in units]
    best, end = tried, _assign(units, tried, ranks, budget, costs)[0]
    even = costs.even(sum(costs.seconds(*each) * each[1] for each in zip(units, tried, strict=True)), ranks)
    for _ in range(_RAISES if len(degrees) > 1 else 0):
        raisable = [i for i, degree in enumerate(tried) if degree < degrees[-1]]
        if not raisable or end <= _EVEN * even:
            break
        longest = max(raisable, key=lambda i: (costs.seconds(units[i], tried[i]), -i))
        tried = [2 * degree if i == longest else degree for i, degree in enumerate(tried)]
        if (sooner := _assign(units, tried, ranks, budget, costs)[0]) < _WORTH * end:
            best, end = tried, sooner
    return best


def _assign(
    units: Sequence[Unit], degrees: Sequence[int], ranks: int, budget: int, costs: Costs
) -> tuple[float, list[int]]:
    """When the last rank ends, and each unit's first rank: high degrees first, the longest to who would end it first.

    Ranks that share a unit are equally loaded before it, so none waits for the others.
    """
    loads, first = [0.0] * ranks, [0] * len(units)
    room: dict[tuple[int, int], int] = {}  # tokens that the last micro-batch of a degree still takes, by first rank
    seconds = [costs.seconds(unit, degree) for unit, degree in zip(units, degrees, strict=True)]
    for i in sorted(range(len(units)), key=lambda i: (-degrees[i], -seconds[i], i)):
        width, tokens = degrees[i], units[i].tokens
        groups = ((costs.rate(rank, width), rank) for rank in range(0, ranks, width))
        end, at, rate = min((loads[rank] + rate * seconds[i], rank, rate) for rate, rank in groups)
        if (left := room.get((width, at), 0)) < tokens:
            end, left = end + rate * costs.start(width), budget * width
        room[width, at] = left - tokens
        loads[at : at + width] = [end] * width
        first[i] = at
    return costs.end(loads), first
