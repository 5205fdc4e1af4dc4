"""Record the step times of an engine as `decode` spans, which cover engine steps but not the idle time between them."""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse import clock
from rlfuse.events import Recorder, Span

STEPS_PER_SPAN = 64


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of an engine."""

    now: float
    decoded: int
    """Samples that already had tokens."""
    length_s: float
    begun: int
    """Samples that got their first token in this step."""
    waited_s: float
    """Longest time to first token."""
    prefilled: int
    tokens: int
    drafted: int = 0
    """Draft tokens that the step verified."""
    accepted: int = 0


class StepMeter:
    """Recorder of one `decode` span per run of steps with the same batch size; steps with prefill get their own spans.

    The duration of a step is the time between two tokens of a sample. The first step after an idle time or a pause
    begins when its first sample arrived or the pause ended, and ends when its statistics arrive.
    """

    def __init__(self, recorder: Recorder, kv_tokens: int):
        self._recorder, self._kv_tokens = recorder, kv_tokens
        self._span: Span | None = None
        self._context = self._usage = 0.0
        self._clock: float | None = None
        """End of the last step (epoch seconds); None when idle."""
        self._idle_since = 0.0
        """When the engine became idle (epoch seconds)."""

    def record(self, step: EngineStep, kv_usage: float, idle: bool) -> bool:
        """Add a step; return False if it had no tokens. `kv_usage`: used fraction of the KV cache, 0 to 1; `idle`: no
        sample is left."""
        if not step.decoded and not step.begun:
            return False
        start, end = self._idle_since if self._clock is None else self._clock, step.now
        if not step.decoded:  # the last step may be long ago if its samples were aborted
            start = max(start, step.now - step.waited_s)
        elif self._clock is not None:
            end = start + step.length_s
        self._clock = end = max(start, end)
        self._add(start, end, step)
        # The cache of finished samples is already free, and that of new samples was not yet used before the step. If
        # nothing was decoded, earlier samples may have been aborted without a report.
        before = self._usage if step.decoded else 0.0
        self._context += max(before, kv_usage) * self._kv_tokens
        self._usage = kv_usage
        if idle:
            self.pause(step.now)
        return True

    def _add(self, start: float, end: float, step: EngineStep) -> None:
        span, batch = self._span, step.decoded + step.begun
        if span is not None:
            attributes_before = span.attributes
            same_kind = attributes_before["batch"] == batch and bool(attributes_before["prefill_tokens"]) == bool(
                step.prefilled
            )
            if not same_kind or attributes_before["steps"] == STEPS_PER_SPAN:
                self.close()
        if self._span is None:
            attributes = {"steps": 0, "batch": batch, "context": 0, "prefill_tokens": 0}
            self._span = Span("decode", self._recorder.where, start, step=self._recorder.step, attributes=attributes)
        self._span.end = end
        self._span.tokens += step.tokens
        self._span.attributes["steps"] += 1
        self._span.attributes["prefill_tokens"] += step.prefilled
        if step.drafted:
            for name, count in (("drafted", step.drafted), ("accepted", step.accepted)):
                self._span.attributes[name] = self._span.attributes.get(name, 0) + count

    def close(self) -> None:
        """End the current span."""
        if self._span is not None:
            self._span.attributes["context"] = round(self._context / self._span.attributes["steps"])
            self._recorder.add(self._span)
        self._span, self._context = None, 0.0

    def pause(self, now: float | None = None) -> None:
        """End the current span; the next step begins after `now`, by default the current time."""
        self.close()
        self._clock, self._idle_since = None, clock.now() if now is None else now
