"""Measure what slots take for their work: stretches of decoding, and calls of one rank. Part of the slot table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.fusion.decisions import Accumulate, Score, Slot

MIN_MEASURED_STEPS = 16  # decoding steps after which a sample tells how fast its engine is
POLL_AFTER_S = 1.0  # an engine of which nothing was heard for so long is asked how far it is
MAX_POLLED = 64  # engines that are asked at a time, so that a large cluster's don't keep its driver busy


@dataclass(slots=True)
class Stretch:
    """What an engine did since it was last measured."""

    steps: float = 0.0  # that it had done before
    since: float = 0.0
    seconds: float = 0.0  # while it held samples
    decoding: float = 0.0  # seconds, of these, for which costs foresee no prefill
    foreseen: float = 0.0  # decoding steps in them, by costs alone
    prefill: float = 0.0  # seconds of prefill that costs foresaw

    def expected(self, steps: float) -> float:
        """Return the predicted seconds of its work, given the steps done in all."""
        return (steps - self.steps) * self.decoding / self.foreseen + self.prefill


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is doing alone."""

    kind: str  # kinds of scoring, or models that are trained, joined by "+"
    call_s: float
    seconds: float  # that costs foresee for its tokens
    since: float
    end: float  # foreseen


class Stopwatch:
    """For `count` slots; `changed` is called with a slot that has another rate now."""

    def __init__(self, count: int, costs: Costs, rates: Rates, changed: Callable[[Slot], None]):
        self._costs, self._rates, self._changed = costs, rates, changed
        self._stretches = [Stretch() for _ in range(count)]
        self._calls: dict[int, Call] = {}
        self._answers: dict[int, tuple[Stretch, int]] = {}
        """Slot -> what it was doing when it was asked, and steps of its engine by then."""

    def begin_stretch(self, slot: Slot, steps: float) -> None:
        self._stretches[slot.index] = Stretch(steps, slot.updated_at)

    def advance(self, slot: Slot, now: float) -> float:
        """Advance to `now`; return the approximate decoding steps of the slot since `updated_at`."""
        stretch, elapsed, decoding = self._stretches[slot.index], now - slot.updated_at, slot.decoding(now)
        foreseen, prefill = decoding / self._costs.decode_step(len(slot.samples), slot.context), elapsed - decoding
        stretch.seconds += elapsed
        stretch.decoding += decoding
        stretch.foreseen += foreseen
        stretch.prefill += prefill / slot.measured_rate
        slot.stall -= prefill / slot.measured_rate
        return foreseen / slot.measured_rate

    def measure(self, slot: Slot, steps: float) -> bool:
        """Update the slot's pace from the decoding steps done in all; return whether they were enough."""
        stretch = self._stretches[slot.index]
        if stretch.foreseen < MIN_MEASURED_STEPS or steps <= stretch.steps:
            return False
        expected = stretch.expected(steps)
        slot.measured_rate = stretch.seconds / expected
        self.begin_stretch(slot, steps)
        self._observe(slot, "decode", stretch.seconds, expected)
        return True

    def silent_engines(self, slots: Iterable[Slot], now: float) -> list[int]:
        waited = [(self._stretches[slot.index].since, slot.index) for slot in slots if slot.samples]
        return [slot for since, slot in nsmallest(MAX_POLLED, waited) if now - since >= POLL_AFTER_S]

    def record_load(self, slot: Slot, steps: int) -> None:
        """Record an engine's own count of decoding steps, higher than at its last answer."""
        stretch, (asked, before) = self._stretches[slot.index], self._answers.get(slot.index, (None, 0))
        if asked is not stretch:  # a sample told of it meanwhile
            self.begin_stretch(slot, slot.steps)
        elif self.measure(slot, done := stretch.steps + steps - before):
            slot.steps = done
        else:
            return
        self._answers[slot.index] = (self._stretches[slot.index], steps)

    def begin_call(self, slot: Slot, call: Score | Accumulate, tokens: Sequence[int], now: float) -> None:
        costs = self._costs
        if isinstance(call, Score):
            kind, predict = "+".join(call.kinds), costs.scoring
        else:
            kind, predict = "+".join(call.models), costs.training
        call_s, seconds = predict(sum(tokens), len(tokens))
        self._calls[slot.index] = Call(kind, call_s, seconds, now, now + call_s + seconds * slot.rate)

    def ends(self) -> list[float]:
        return [call.end for call in self._calls.values()]

    def end_call(self, slot: Slot, now: float) -> None:
        """End the slot's call, if any. A short one measures the fixed cost of calls, not the slot."""
        call = self._calls.pop(slot.index, None)
        if call is not None and call.seconds >= call.call_s:
            self._observe(slot, call.kind, now - call.since, call.call_s + call.seconds)

    def _observe(self, slot: Slot, kind: str, seconds: float, expected: float) -> None:
        self._rates.observe(slot.index, kind, seconds, expected)
        slot.steps_since_measured = 0
        if (rate := self._rates.current[slot.index]) != slot.rate:
            if kind != "decode":
                slot.measured_rate *= rate / slot.rate
            slot.rate = rate
            self._changed(slot)
