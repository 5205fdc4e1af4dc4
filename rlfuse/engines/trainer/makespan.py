"""How long a plan of micro-batches takes by its own account, and what no plan could undercut.

Role: pure; trainer groups note both for every plan over several ranks, and the metric log tells their ratio
(`balance/*`). Times are in the unit of `degrees.Costs`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlfuse.engines.trainer.degrees import Costs, Share, Unit


def makespan(shares: Sequence[Sequence[Share]], units: Sequence[Unit], costs: Costs, lockstep: bool) -> float:
    """When the last rank ends; in `lockstep` every micro-batch ends when its slowest does."""
    unit_of = {unit.rows[0]: unit for unit in units}

    def seconds(rank: int, share: Share) -> float:
        if not share.rows:
            return 0.0
        rate = costs.rate(rank // share.degree * share.degree, share.degree)
        work = sum(costs.seconds(unit_of[row], share.degree) for row in share.rows if row in unit_of)
        return rate * (costs.start(share.degree) + work)

    taken = [[seconds(rank, share) for share in mine] for rank, mine in enumerate(shares)]
    if lockstep:
        return sum(map(costs.end, zip(*taken, strict=True)))
    return costs.end([sum(mine) for mine in taken])


def bounds(units: Sequence[Unit], ranks: int, budget: int, degrees: Sequence[int], costs: Costs) -> tuple[float, float]:
    """Two that no plan undercuts: all work shared out evenly, and the longest unit alone at the best degree that has
    room for it. Micro-batches start for nothing, so that plans are above both where those count."""
    fastest = min(costs.rate(rank, 1) for rank in range(ranks))
    total = longest = 0.0
    for unit in units:
        fitting = [degree for degree in degrees if unit.tokens <= degree * budget] or [degrees[-1]]
        seconds = {degree: costs.seconds(unit, degree) for degree in fitting}
        total += min(degree * each for degree, each in seconds.items())
        longest = max(longest, fastest * min(costs.crowded(degree) * each for degree, each in seconds.items()))
    return costs.even(total, ranks), longest
