"""Time series of all workers per second and window: work done, expected work and samples of agents.

A worker has a value only in windows in which it worked (or, for signals per time, was sampled).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor
from statistics import median

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.costs.spans import is_work, predicted
from rlfuse.events import Span
from rlfuse.health.signals import SIGNALS, SLOWNESS, Signal

STARTED = ("start", "restart")  # spans after which a worker is a new process
MAX_RATIOS = 128  # first pieces of work per class and worker that define its factor
MIN_RATIOS = 5  # minimum pieces of work for a factor

Class = tuple[str, ...]


def class_of(span: Span) -> Class:
    """Return the class of a piece of work; within a class, the cost model predicts relative times well."""
    facts = span.attributes
    size = facts["batch"] if span.kind == "decode" else max(1, span.tokens)
    shape = (bool(facts.get("prefill_tokens")), *(facts.get(name) for name in ("model", "stage", "degree", "function")))
    return (span.kind, str(int(size).bit_length()), *map(str, shape))


class WarmUpFilter:
    """Filter of warm-up work: in their first step, workers compile and fill caches, so it is ignored."""

    def __init__(self) -> None:
        self._workers: set[str] = set()

    def work_of(self, spans: Iterable[Span]) -> tuple[list[Span], set[str]]:
        """Return a step's work of workers past their first step, and the workers that started in the step."""
        spans = list(spans)
        started = {span.where for span in spans if span.kind in STARTED}
        self._workers -= started
        work = [span for span in spans if is_work(span)]
        settled = [span for span in work if span.where in self._workers]
        self._workers |= {span.where for span in work}
        return settled, started


class ExpectedSeconds:
    """Expected seconds of work, by the run's fitted costs times a factor per class of work."""

    def __init__(self) -> None:
        self._costs: Costs | None = None
        self._ratios: dict[Class, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._factors: dict[Class, float | None] = {}

    def learn(self, spans: Iterable[Span], costs: Costs) -> None:
        self._costs = costs if self._costs is None else self._costs
        for span in spans:
            if is_work(span) and (by_costs := predicted(span, self._costs)) > 0:
                kept = self._ratios[group := class_of(span)][span.where]
                if len(kept) < MAX_RATIOS:
                    kept.append(span.seconds / by_costs)
                    self._factors.pop(group, None)

    def seconds(self, span: Span) -> float | None:
        """Return the seconds that a piece of work should take; None if unknown."""
        if self._costs is None or (factor := self._factor(class_of(span))) is None:
            return None
        return factor * predicted(span, self._costs)

    def _factor(self, group: Class) -> float | None:
        if group not in self._factors:
            ratios = self._ratios.get(group, {})
            enough = sum(map(len, ratios.values())) >= MIN_RATIOS
            self._factors[group] = median(map(median, ratios.values())) if enough else None
        return self._factors[group]


WINDOW_S = 8.0  # window length (8 samples of 1 s, as in the paper); a shorter step is one window
LEAST_WORK_S = 0.1  # minimum expected work per window to judge a worker
BUSY = 0.1  # minimum expected work per second for a sample to count as busy


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample of a worker, or of its node (`node/ADDRESS`), over the `seconds` before `end`."""

    worker: str
    end: float
    seconds: float
    amounts: Mapping[str, float]  # totals for signals per work, means for all others


@dataclass(frozen=True, slots=True)
class Window:
    """Values of all workers, from `start` to `end` (epoch seconds)."""

    step: int
    start: float
    end: float
    values: Mapping[str, Mapping[str, tuple[float, float]]]  # signal -> worker -> (value, weight)


@dataclass
class Series:
    """Series of one step, from `start` to `end` (epoch seconds)."""

    start: float
    end: float
    _cells: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    """(name, worker) -> [2, seconds]: amount, and seconds covered by data."""
    _workers: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.seconds = max(1, ceil(self.end - self.start))

    def add(self, name: str, worker: str, begin: float, end: float, amount: float) -> None:
        """Distribute an amount over its seconds, clipped to the series."""
        begin, end = max(0.0, begin - self.start), min(end - self.start, float(self.seconds))
        if end <= begin:
            return
        if (cell := self._cells.get((name, worker))) is None:
            cell = self._cells[name, worker] = np.zeros((2, self.seconds))
            self._workers[name][worker] = None
        for second in range(floor(begin), ceil(end)):
            covered = min(end, second + 1) - max(begin, second)
            cell[0, second] += amount * covered / (end - begin)
            cell[1, second] += covered

    def add_spans(self, spans: Sequence[Span], expected: ExpectedSeconds) -> None:
        for span in spans:
            if is_work(span) and (seconds := expected.seconds(span)):
                self.add(SLOWNESS, span.where, span.start, span.end, span.seconds)
                self.add("work", span.where, span.start, span.end, seconds)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            for name, amount in sample.amounts.items():
                whole = amount if name in SIGNALS and SIGNALS[name].per == "work" else amount * sample.seconds
                self.add(name, sample.worker, sample.end - sample.seconds, sample.end, whole)

    def windows(self, step: int) -> list[Window]:
        count = max(1, round(self.seconds / WINDOW_S))
        edges = np.linspace(0, self.seconds, count + 1).round().astype(int)
        return [
            Window(step, self.start + first, min(self.start + last, self.end), self._values(first, last))
            for first, last in pairwise(edges.tolist())
        ]

    def mean(self, name: str, worker: str) -> float | None:
        cell = self._cells.get((name, worker))
        return None if cell is None or not cell[1].any() else float(cell[0].sum() / cell[1].sum())

    def workers(self, name: str) -> list[str]:
        return list(self._workers[name])

    def _values(self, first: int, last: int) -> dict[str, dict[str, tuple[float, float]]]:
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for signal in SIGNALS.values():
            values = {worker: self._value(signal, worker, first, last) for worker in self._workers[signal.name]}
            found[signal.name] = {worker: value for worker, value in values.items() if value is not None}
        return found

    def _value(self, signal: Signal, worker: str, first: int, last: int) -> tuple[float, float] | None:
        amount, known = self._cells[signal.name, worker][:, first:last]
        if signal.per == "time":
            return (float(amount.sum() / known.sum()), float(known.sum())) if known.any() else None
        if (cell := self._cells.get(("work", worker))) is None:
            return None
        work = cell[0, first:last]
        if signal.name != SLOWNESS:
            counted = (work > BUSY) & (known > 0.5)
            amount, known, work = amount[counted], known[counted], work[counted]
        if work.sum() < LEAST_WORK_S:
            return None
        value = float(amount.sum() / (work if signal.per == "work" else known).sum())
        return (value, float(work.sum())) if value + signal.unit > 0 else None
