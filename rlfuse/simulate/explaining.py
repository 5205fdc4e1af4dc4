"""The cost terms of other systems in words, and what each makes of a step.

Role: `rlfuse simulate --explain`. Simulates a step for each term that has something to change.
Invariant: a term is seen alone: beside it all others are as the workload has them.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import fields, replace
from typing import Any

from rlfuse.config.documentation import field_texts
from rlfuse.simulate import terms
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.terms import SOURCES, Parts, Terms
from rlfuse.simulate.workload import Workload

WIDTH = 110
COLUMN = max(map(len, SOURCES)) + 2
NONE = Terms()


def sources() -> str:
    """What each term is, and who published it."""
    texts = field_texts(terms)
    lines = [
        'cost terms of systems that this project does not have: "terms" of a workload, shares of its work: "parts"'
    ]
    for name, source in SOURCES.items():
        words = f"{texts['Terms', name]} {source.says}."
        lines += textwrap.wrap(words, WIDTH, initial_indent=f"{name:<{COLUMN}}", subsequent_indent=" " * COLUMN)
    return "\n".join(lines)


def terms_table(workload: Workload, policy: str) -> str:
    """Seconds of the step as the workload has each term, without it, and as published; the policy is not tuned."""

    @functools.cache
    def seconds(given: Terms) -> float:
        return simulate(replace(workload, terms=given), policy).result.step_s

    def cell(name: str, value: Any) -> str:
        given = replace(workload.terms, **{name: value})
        return f"{seconds(given):.2f} s" if SOURCES[name].acts_on(workload.parts) else "-"

    shares = ", ".join(f"{entry.name} {getattr(workload.parts, entry.name):g}" for entry in fields(Parts))
    lines = [f"{policy}: {seconds(workload.terms):.2f} s a step; parts: {shares}"]
    lines.append(f"{'':<{COLUMN}}{'here':>8}{'published':>11}{'without it':>14}{'as published':>14}")
    for name, source in SOURCES.items():
        here, without, figure = getattr(workload.terms, name), getattr(NONE, name), source.figure
        published = "-" if figure is None else f"{figure:g}"
        row = f"{name:<{COLUMN}}{here:>8g}{published:>11}{cell(name, without):>14}"
        lines.append(row + f"{'-' if figure is None else cell(name, figure):>14}")
    return "\n".join(lines)
