"""Measure the speed of slots from stretches of decoding and from calls of single ranks. Part of the slot table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.fusion.decisions import Accumulate, Score, Slot

MIN_MEASURED_STEPS = 16  # minimum decoding steps of a measurement
POLL_AFTER_S = 1.0  # an engine without finished samples for this long is polled
MAX_POLLED = 64  # maximum engines polled at a time, which bounds the work of the driver


@dataclass(slots=True)
class Stretch:
    """Decoding of one engine since its last measurement."""

    steps: float = 0.0  # decoding steps done before it
    since: float = 0.0  # its start
    seconds: float = 0.0  # seconds with samples
    decoding: float = 0.0  # seconds of these without predicted prefill
    foreseen: float = 0.0  # predicted decoding steps in them
    prefill: float = 0.0  # predicted seconds of prefill

    def expected(self, steps: float) -> float:
        """Return the predicted seconds of its work, given the total of decoding steps."""
        return (steps - self.steps) * self.decoding / self.foreseen + self.prefill


@dataclass(frozen=True, slots=True)
class Call:
    """A call that runs on a single rank."""

    kind: str  # kinds of scoring, or models that are trained, joined by "+"
    call_s: float
    seconds: float  # predicted from its tokens, without `call_s`
    since: float  # its start
    end: float  # predicted


class Stopwatch:
    """Speed measurements of `count` slots. `changed` is called with each slot whose rate changed."""

    def __init__(self, count: int, costs: Costs, rates: Rates, changed: Callable[[Slot], None]):
        self._costs, self._rates, self._changed = costs, rates, changed
        self._stretches = [Stretch() for _ in range(count)]
        self._calls: dict[int, Call] = {}
        self._answers: dict[int, tuple[Stretch, int]] = {}
        """Slot -> its stretch and its engine's count of decoding steps at the latest reply."""

    def begin_stretch(self, slot: Slot, steps: float) -> None:
        self._stretches[slot.index] = Stretch(steps, slot.updated_at)

    def advance(self, slot: Slot, now: float) -> float:
        """Advance the slot's stretch to `now` and return the estimated decoding steps since `updated_at`."""
        stretch, elapsed, decoding = self._stretches[slot.index], now - slot.updated_at, slot.decoding(now)
        foreseen, prefill = decoding / self._costs.decode_step(len(slot.samples), slot.context), elapsed - decoding
        stretch.seconds += elapsed
        stretch.decoding += decoding
        stretch.foreseen += foreseen
        stretch.prefill += prefill / slot.measured_rate
        slot.stall -= prefill / slot.measured_rate
        return foreseen / slot.measured_rate

    def measure(self, slot: Slot, steps: float) -> bool:
        """Update the slot's pace from its total of decoding steps. Return False if there were too few to measure."""
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
        """Record an engine's count of decoding steps."""
        stretch, (measured, before) = self._stretches[slot.index], self._answers.get(slot.index, (None, 0))
        if measured is not stretch:  # a finished sample was measured since the last reply
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
        """End the slot's call, if any. Short calls are not measured: their fixed cost dominates."""
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
