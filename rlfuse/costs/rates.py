"""Estimate the rate of each slot: the time of its work relative to a typical slot (rate 1).

`Rates` are updated during a run; a rate changes only when the median of the last three observations differs from it
by DEAD_BAND. `slot_rates` and `typical_seconds` read recorded runs, and fit costs and rates together, as a slow worker
gets less work.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import Any

import numpy as np

from rlfuse.costs.fit import fit_robust
from rlfuse.costs.model import Costs
from rlfuse.costs.spans import call_terms, decoding_amounts, decoding_terms, is_work, role_of
from rlfuse.events import Span

THRESHOLD = 1.2  # a slot is slow from this rate on, and fast below its inverse
DEAD_BAND = 0.3  # relative difference between a rate and new observations below which the rate does not change
OBSERVATIONS = 3  # number of observations whose median is used, so that a single hiccup has no effect
HICCUP_S = 1.0  # hiccups are shorter: work that exceeds its prediction by more counts twice
MIN_EXPECTED_S = 0.2  # shorter work is combined with the next observation
REFRESH = 8  # the typical ratio is recomputed after slots / REFRESH observations


class Rates:
    """The current rate of each of `slots` slots; 1 until work is observed.

    `drained`: slots drained from the start; `returning`: the subset that is restored once they are as fast as the
    others. Both sets belong to the caller and are updated in place. `measured=False` keeps all rates at 1, for runs in
    which nothing may depend on measured times.
    """

    def __init__(
        self, slots: int, drained: set[int] | None = None, returning: set[int] | None = None, measured: bool = True
    ):
        self._measured = measured
        self.current = [1.0] * slots  # rate by slot
        self.drained: set[int] = set() if drained is None else drained
        self.steps_since_measured: dict[int, int] = {}  # slow slot -> steps since its last observation
        self._last = [deque((1.0,) * OBSERVATIONS, OBSERVATIONS) for _ in range(slots)]
        self._returning: set[int] = set() if returning is None else returning
        for slot in self._returning:
            self._last[slot].clear()
        self._peers: defaultdict[str, _Peers] = defaultdict(lambda: _Peers(slots))
        self._short: dict[tuple[int, str], tuple[float, float]] = {}  # measured and predicted seconds
        self._costs: Costs | None = None

    @classmethod
    def of(cls, speeds: Sequence[float]) -> Rates:
        """Return the rates that steps on slots of these speeds would have measured."""
        rates, typical = cls(len(speeds)), median_low(1 / speed for speed in speeds)
        for slot, speed in enumerate(speeds):
            rates._last[slot].extend((1 / (speed * typical),) * OBSERVATIONS)
            rates._decide(slot)
        return rates

    def begin(self, costs: Costs) -> None:
        """Start a step; typical ratios measured with other costs are dropped."""
        if costs != self._costs:
            self._costs = costs
            self._peers.clear()
        self._short.clear()
        slow = (slot for slot, rate in enumerate(self.current) if rate > 1 and slot not in self.drained)
        self.steps_since_measured = {slot: self.steps_since_measured.get(slot, 0) + 1 for slot in slow}

    def observe(self, slot: int, kind: str, seconds: float, expected: float) -> None:
        """Record work of one kind that took `seconds`, where the costs predict `expected`."""
        if seconds <= 0 or expected <= 0 or not self._measured:
            return
        self.steps_since_measured.pop(slot, None)
        before = self._short.pop((slot, kind), (0.0, 0.0))
        seconds, expected = seconds + before[0], expected + before[1]
        if expected < MIN_EXPECTED_S:
            self._short[slot, kind] = seconds, expected
            return
        typical = self._peers[kind].note(slot, seconds / expected)
        if typical is None:
            return
        for _ in range(1 if seconds - expected * typical < HICCUP_S else 2):
            self._last[slot].append(seconds / (expected * typical))
        self._decide(slot)

    def record_probe(self, slot: int, rate: float) -> None:
        """Record the `rate` of a drained slot, measured with fixed work relative to slots in use."""
        self._last[slot].append(rate)
        if self._measured:
            self._decide(slot)
        last = self._last[slot]
        if slot in self._returning and len(last) == OBSERVATIONS and median(last) < THRESHOLD:
            self.restore(slot)

    def _decide(self, slot: int) -> None:
        if len(self._last[slot]) < OBSERVATIONS:
            return
        now, rate = median(self._last[slot]), self.current[slot]
        if not 1 / (1 + DEAD_BAND) <= now / rate <= 1 + DEAD_BAND:
            self.current[slot] = 1.0 if 1 / THRESHOLD < now < THRESHOLD else now

    def drain(self, slot: int, until_recovered: bool = False) -> None:
        self.drained.add(slot)
        self._returning.discard(slot)
        if until_recovered:  # only probes count: earlier observations may not show the reason for draining
            self._returning.add(slot)
            self._last[slot].clear()

    def restore(self, slot: int) -> None:
        self.drained.discard(slot)
        self._returning.discard(slot)


class _Peers:
    """Ratios of measured to predicted seconds of one kind of work, by slot."""

    def __init__(self, slots: int):
        self._slots = slots
        self._measured: dict[int, float] = {}
        self._typical: float | None = None
        self._until_refresh = 0

    def note(self, slot: int, measured: float) -> float | None:
        """Add a ratio and return the typical one, or None until half of the slots were observed. O(1) amortised."""
        self._measured[slot] = measured
        self._until_refresh -= 1
        if 2 * len(self._measured) >= self._slots and (self._typical is None or self._until_refresh <= 0):
            self._typical = median_low(self._measured.values())
            self._until_refresh = self._slots // REFRESH
        return self._typical


SLOW = 1.1  # recorded rates below this are noise: the worker counts as typical
MAX_ROUNDS, SETTLED = 20, 1e-3  # alternating fits end after this many rounds, or when rates change by less
MIN_OPERATIONS = 4  # minimum operations of a kind to fit the dependence on tokens

Group = tuple[np.ndarray, np.ndarray]  # comparable operations, int [n], and the terms of their time


def slot_rates(spans: Sequence[Span], slots: int, width: int, ranks_synchronise: bool) -> tuple[float, ...]:
    """Return the rate of each slot, or nothing where all are typical. `width`: trainer ranks of a slot;
    `ranks_synchronise`: ranks wait for each other within their passes, so that only decoding shows how slow a slot
    is."""
    of_ranks = [] if ranks_synchronise else ["trainer"]
    work = [span for span in spans if is_work(span) and role_of(span.where) in ("rollout", *of_ranks)]
    work = [span for span in work if span.attributes.get("degree", 1) == 1]
    if not work:
        return ()
    widths = {"rollout": 1, "trainer": width}
    worker = np.array([int(span.where.partition("/")[2]) // widths[role_of(span.where)] for span in work])
    measured = np.array([span.seconds for span in work])
    found = np.ones(slots)
    rates = relative_rates(
        measured, typical_seconds(group_comparable([span.kind for span in work], work, 1), measured, worker), worker
    )
    found[: len(rates)] = rates
    return tuple(found.tolist()) if max(found.max(), 1 / found.min()) >= SLOW else ()


def group_comparable(kinds: Sequence[str], spans: Sequence[Span], flat_batch: int) -> list[Group]:
    """Group spans, each counted as one of these kinds, by kind, function or model, and stage."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, (kind, span) in enumerate(zip(kinds, spans, strict=True)):
        attributes = span.attributes
        found[kind, attributes.get("function", attributes.get("model")), attributes.get("stage")].append(number)
    groups = []
    for (kind, *_), numbers in found.items():
        mine = [spans[number] for number in numbers]
        decoding = kind == "decode"
        terms = decoding_terms(decoding_amounts(mine), flat_batch) if decoding else call_terms([s.tokens for s in mine])
        groups.append((np.array(numbers), terms))
    return groups


def typical_seconds(groups: Sequence[Group], measured: np.ndarray, worker: np.ndarray) -> np.ndarray:
    """Return float [N]: the expected seconds of each operation at the speed that at least half of the workers reach; of
    two the faster one's. `measured`, float [N]: measured; operations in no group keep theirs. `worker`: int [N]."""
    typical, expected = measured.copy(), _expected_seconds(groups, measured, worker)
    for numbers, _ in groups:
        _, of = np.unique(worker[numbers], return_inverse=True)
        usual = median_low(relative_rates(measured[numbers], expected[numbers], of).tolist())
        typical[numbers] = expected[numbers] * usual
    return typical


def _expected_seconds(groups: Sequence[Group], measured: np.ndarray, worker: np.ndarray) -> np.ndarray:
    """Return float [N]: what the work of each operation takes, up to a factor that those of a group share.

    Workers that get less work because they are slow take as long as the others, which may look as if tokens cost
    nothing. So it is fitted twice, from rates of 1 and from rates by tokens alone; the better prediction counts.
    """
    by_tokens = measured.copy()
    for numbers, columns in groups:
        if (tokens := columns[:, -1].sum()) and columns.shape[1] == 2:
            by_tokens[numbers] = columns[:, -1] * measured[numbers].sum() / tokens
    equal = np.ones(int(worker.max(initial=0)) + 1)
    found = [
        _expected(groups, measured, worker, rates) for rates in (relative_rates(measured, by_tokens, worker), equal)
    ]
    return min(
        found,
        key=lambda expected: np.abs(measured - expected * relative_rates(measured, expected, worker)[worker]).sum(),
    )


def _expected(groups: Iterable[Group], measured: np.ndarray, worker: np.ndarray, rates: np.ndarray) -> np.ndarray:
    expected = measured.copy()
    for _ in range(MAX_ROUNDS):
        for numbers, columns in groups:
            seconds = measured[numbers] / rates[worker[numbers]]
            few = len(numbers) < MIN_OPERATIONS
            expected[numbers] = seconds.mean() if few else columns @ fit_robust(columns, seconds)[0]
        before, rates = rates, relative_rates(measured, expected, worker)
        if np.allclose(rates, before, rtol=SETTLED):
            break
    return expected


def relative_rates(measured: np.ndarray, expected: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Return float [workers]: measured over expected seconds of the operations `of` each; 1 where nothing was
    expected."""
    foreseen = np.bincount(of, expected)
    return np.divide(np.bincount(of, measured), foreseen, out=np.ones_like(foreseen), where=foreseen > 0)
