"""Measure how fast each slot is relative to the others: seconds of its work over the seconds that costs predict.

Typical slots have rate 1. A rate moves only when the median of the last three observations differs from it by
DEAD_BAND; rates within THRESHOLD count as typical. Drained slots are probed until they are restored.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median, median_low

from rlfuse.fusion.costs import Costs

THRESHOLD = 1.2  # a slot is slow from this rate on (and fast below its inverse)
DEAD_BAND = 0.3  # share by which a rate is exceeded, or falls short of itself, before it moves
OBSERVATIONS = 3  # the middle one of so many decides: a single hiccup doesn't
HICCUP_S = 1.0  # hiccups are shorter: work that took so much longer than foreseen counts twice
TOLD_BY_S = 0.2  # work predicted to be shorter is observed together with what follows
REFRESH = 8  # what is typical is worked out anew after one observation for each so many slots


class Rates:
    """Of `slots` slots, all of them typical until they were seen at work.

    `drained`: from the start on, `returning`: of these, until they are as fast as the others; both sets are the
    caller's, and change with what is drained. `measured`: false leaves all of them typical, for runs in which nothing
    may go by measured times.
    """

    def __init__(
        self,
        slots: int,
        drained: set[int] | None = None,
        returning: set[int] | None = None,
        measured: bool = True,
    ):
        self._measured = measured
        self.current = [1.0] * slots  # slot -> its rate, for plans
        self.drained: set[int] = set() if drained is None else drained
        self.unheard: dict[int, int] = {}  # slow slot -> steps since it was last observed
        self._last = [deque((1.0,) * OBSERVATIONS, OBSERVATIONS) for _ in range(slots)]
        self._returning: set[int] = set() if returning is None else returning
        for slot in self._returning:
            self._last[slot].clear()
        self._peers: defaultdict[str, _Peers] = defaultdict(lambda: _Peers(slots))
        self._short: dict[tuple[int, str], tuple[float, float]] = {}  # measured and predicted seconds
        self._costs: Costs | None = None

    @classmethod
    def of(cls, speeds: Sequence[float]) -> Rates:
        """As steps leave them on slots of these speeds."""
        rates, typical = cls(len(speeds)), median_low(1 / speed for speed in speeds)
        for slot, speed in enumerate(speeds):
            rates._last[slot].extend((1 / (speed * typical),) * OBSERVATIONS)
            rates._decide(slot)
        return rates

    def begin(self, costs: Costs) -> None:
        """A step begins; what was typical by other costs is forgotten."""
        if costs != self._costs:
            self._costs = costs
            self._peers.clear()
        self._short.clear()
        slow = (slot for slot, rate in enumerate(self.current) if rate > 1 and slot not in self.drained)
        self.unheard = {slot: self.unheard.get(slot, 0) + 1 for slot in slow}

    def observe(self, slot: int, kind: str, seconds: float, expected: float) -> None:
        """A stretch of work of one kind took so long; costs foresaw `expected` seconds."""
        if seconds <= 0 or expected <= 0 or not self._measured:
            return  # nothing to tell
        self.unheard.pop(slot, None)
        before = self._short.pop((slot, kind), (0.0, 0.0))
        seconds, expected = seconds + before[0], expected + before[1]
        if expected < TOLD_BY_S:
            self._short[slot, kind] = seconds, expected
            return
        typical = self._peers[kind].note(slot, seconds / expected)
        if typical is None:
            return
        for _ in range(1 if seconds - expected * typical < HICCUP_S else 2):
            self._last[slot].append(seconds / (expected * typical))
        self._decide(slot)

    def probed(self, slot: int, rate: float) -> None:
        """Fixed work took a drained slot so many times as long as those that get work."""
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

    def drain(self, slot: int, until_well: bool = False) -> None:
        self.drained.add(slot)
        self._returning.discard(slot)
        if until_well:  # which probes alone tell: whoever drained it may know more than was observed
            self._returning.add(slot)
            self._last[slot].clear()

    def restore(self, slot: int) -> None:
        self.drained.discard(slot)
        self._returning.discard(slot)


class _Peers:
    """What slots measured for one kind of work, and what is typical of it."""

    def __init__(self, slots: int):
        self._slots = slots
        self._measured: dict[int, float] = {}
        self._typical: float | None = None
        self._until_refresh = 0

    def note(self, slot: int, measured: float) -> float | None:
        """Count it in; what is typical now, None until half of the slots were seen. O(1), but for now and then."""
        self._measured[slot] = measured
        self._until_refresh -= 1
        if 2 * len(self._measured) >= self._slots and (self._typical is None or self._until_refresh <= 0):
            self._typical = median_low(self._measured.values())
            self._until_refresh = self._slots // REFRESH
        return self._typical
