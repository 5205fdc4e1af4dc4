"""The report's section on slow workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlfuse.report.gather import Gathered
from rlfuse.whatif.causes import SLOW, Cause
from rlfuse.whatif.questions import Answer
from rlfuse.whatif.run_slowdown import RunSlowdown
from rlfuse.whatif.slowdown import ATTRIBUTED

MOST = 12  # workers and kinds of work, the slowest first
REAL, IDEAL, BLAMED, FINE = "#3f7fbf", "#9cc0e0", "#b3304f", "#c9c3bb"
HOT, COOL_RGB, HOT_RGB = 1.5, (230, 227, 222), (214, 84, 110)
Row = tuple[str, float, str, str]  # (name, share of the width, colour, text)


@dataclass(frozen=True, slots=True)
class Shown:
    """Of one run."""

    verdict: str
    cause: Cause | None
    heat: list[tuple[int, float, str]]  # (slot, its time over expected, colour)
    tables: list[tuple[str, list[Row]]]


def shown(run: Gathered) -> Shown:
    """Of a run that has a slowdown."""
    assert run.slowdown is not None
    found = run.slowdown
    tables = [("A step takes", _times(found)), ("Slowest workers: time over expected", _workers(found))]
    if found.S_t is not None:
        tables.append(("Each kind of work alone slows the run by", _kinds(found.S_t)))
    return Shown(
        _verdict(found), found.cause, _heat(found), [*tables, ("What if", _questions(found.seconds, run.what_if))]
    )


def _verdict(found: RunSlowdown) -> str:
    if found.cause is None:
        return f"Nobody is to blame: a step is within {found.S - 1:.1%} of what it would be if all workers were alike."
    machines, work = "machines that are slower than their like", "work that is shared out unevenly"
    by = {machines: found.S_machine - 1, work: found.S_skew - 1}
    parts = [f"{share:.0%} by {what}" for what, share in by.items() if share >= ATTRIBUTED - 1]
    return f"A step takes {found.S - 1:.0%} longer than it would have to: {' and '.join(parts) or 'by both a little'}."


def _times(found: RunSlowdown) -> list[Row]:
    times = {
        "as it was": (found.seconds, REAL),
        "no worker slow": (found.no_slow_machine_seconds, IDEAL),
        "and evenly shared": (found.ideal_seconds, IDEAL),
    }
    most = max(seconds for seconds, _ in times.values())
    return [(name, seconds / most, colour, f"{seconds:.2f} s") for name, (seconds, colour) in times.items()]


def _heat(found: RunSlowdown) -> list[tuple[int, float, str]]:
    rates = {int(name.split()[1]): rate for name, rate in found.rates.items() if name.startswith("slot ")}
    return [(slot, rates[slot], _warmth(rates[slot])) for slot in sorted(rates)]


def _warmth(rate: float) -> str:
    share = min(1.0, max(0.0, (rate - 1) / (HOT - 1)))
    mixed = [round(pale + share * (red - pale)) for pale, red in zip(COOL_RGB, HOT_RGB, strict=True)]
    return f"rgb({', '.join(map(str, mixed))})"


def _workers(found: RunSlowdown) -> list[Row]:
    rates = list(found.rates.items())[:MOST]
    most = max(rate for _, rate in rates)
    return [
        (name, rate / most, BLAMED if rate >= SLOW else FINE, f"{rate:.2f} (the run: {found.workers[name]:.2f})")
        for name, rate in rates
    ]


def _kinds(kinds: dict[str, float]) -> list[Row]:
    costly = [(name, value - 1) for name, value in kinds.items() if value > 1][:MOST]
    most = max((share for _, share in costly), default=1.0)
    return [(name, share / most, REAL, f"{share:.1%}") for name, share in costly if share >= 0.001]


def _questions(seconds: float, asked: Sequence[Answer]) -> list[Row]:
    most = max([seconds, *(answer.seconds for answer in asked)])
    return [
        (answer.question, answer.seconds / most, IDEAL, f"{answer.seconds:.2f} s ({answer.change:+.1%})")
        for answer in asked
    ]
