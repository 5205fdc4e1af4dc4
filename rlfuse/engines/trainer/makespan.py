"""Predicted time of a plan of micro-batches, and lower bounds on the time of any plan.

Role: pure; trainer groups record both for every plan over several ranks, and the metric log reports their ratio
(`balance/*`). Times are in the unit of `sequence_parallel_packing.Costs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from rlfuse.engines.trainer.sequence_parallel_packing import Costs, Share, Unit


def makespan(shares: Sequence[Sequence[Share]], units: Sequence[Unit], costs: Costs, lockstep: bool) -> float:
    """Return when the last rank ends; in `lockstep` a micro-batch ends on all ranks when the slowest one does."""
    unit_of = {unit.rows[0]: unit for unit in units}

    def seconds(rank: int, share: Share) -> float:
        """Return the time of a share on its first rank; its other ranks take as long."""
        if not share.rows:
            return 0.0
        work = sum(costs.seconds(unit_of[row], share.degree) for row in share.rows if row in unit_of)
        return costs.rate(rank, share.degree) * (costs.start(share.degree) + work)

    taken: list[list[float]] = []
    for rank, mine in enumerate(shares):
        firsts = [rank // share.degree * share.degree for share in mine]
        taken.append([taken[first][at] if first < rank else seconds(rank, mine[at]) for at, first in enumerate(firsts)])
    if lockstep:
        return sum(map(costs.end, zip(*taken, strict=True)))
    return costs.end([sum(mine) for mine in taken])


def bounds(
    units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs, lockstep: bool = False
) -> tuple[float, float]:
    """Return two lower bounds on the time of any plan: all work divided evenly, and long units.

    Both ignore the overhead of micro-batches. Long units: the longest alone, at the best degree that has room for it;
    those that have to share a group of ranks; and in `lockstep` those that fill more than half of a micro-batch of the
    highest degree, so that each needs its own.
    Example: 10, 9 and 8 tokens on 4 ranks with a budget of 5 and degrees 1, 2 -> 27 / 4, and (9 + 8) / 2.
    """
    highest, groups = degrees[-1], ranks // degrees[-1]
    total, longest, times = 0.0, 0.0, list[tuple[float, float]]()
    for unit in units:
        fitting = [degree for degree in degrees if unit.tokens <= degree * budget] or [highest]
        seconds = {degree: costs.seconds(unit, degree) for degree in fitting}
        total += min(degree * each for degree, each in seconds.items())
        contention = {degree: costs.contention(degree) * each for degree, each in seconds.items()}
        longest = max(longest, min(contention.values()))
        times.append((contention.pop(highest), min(contention.values(), default=math.inf)))
    longest = max(longest, _bound_of_long_units(times, groups))
    if lockstep:
        alone = [whole for unit, (whole, _) in zip(units, times, strict=True) if 2 * unit.tokens > highest * budget]
        longest = max(longest, sum(sorted(alone, reverse=True)[::groups]))
    return costs.even(total, ranks), longest * min(costs.rate(rank, 1) for rank in range(ranks))


def _bound_of_long_units(times: Sequence[tuple[float, float]], groups: int) -> float:
    """Return the bound for n * groups + 1 units: n + 1 of them share a group, unless one runs on fewer ranks.

    `times`: for each unit (time on a whole group, best time on fewer ranks).
    """
    times = sorted(times, reverse=True)
    sums = [0.0, *accumulate(whole for whole, _ in times)]
    fewer = list(accumulate((each for _, each in times), min))
    counts = range(1, (len(times) - 1) // groups + 1)
    return max((min(sums[n * groups + 1] - sums[n * groups - n], fewer[n * groups]) for n in counts), default=0.0)
