"""Everything that happens is an event: typed spans of work, the one source for traces, idle accounting and reports.

Role: a leaf, but for `files`, that any module may import. Each process owns one `Recorder`; the driver drains them
all after a step and appends the spans to `events.jsonl` in the run folder. Times are seconds since the epoch of the
recording host's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlfuse import clock
from rlfuse.files import RowFile, read_rows


@dataclass(slots=True)
class Span:
    """One piece of work: what, where, when, for which samples, how many tokens, caused by what."""

    kind: str
    """`generate reward old_log_prob ref values forward backward optimizer update_weights data checkpoint ...`."""
    where: str
    """The process or slot that did it: `rollout/0`, `trainer/1`, `reward/0`, `driver`."""
    start: float
    end: float = 0.0
    step: int = -1
    samples: tuple[str, ...] = ()
    tokens: int = 0
    cause: str = ""
    """What made it start: a policy decision, a finished sample, an optimizer step."""
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recorder:
    """The spans of one process, kept until drained. Used from one thread or event loop."""

    def __init__(self, where: str):
        self.where = where
        self.step = -1
        self.open: dict[int, Span] = {}
        """Spans under way, oldest first."""
        self.heard: list[Callable[[str], Any]] = []
        """Each is told what begins and ends, as it does."""
        self._spans: list[Span] = []

    @contextmanager
    def span(self, kind: str, **fields: Any) -> Iterator[Span]:
        """Record the body as a span; the body may set fields on the yielded span. Recorded also when it raises."""
        span = Span(kind, self.where, clock.now(), step=fields.pop("step", self.step), **fields)
        self.open[id(span)] = span
        self._tell(f"began {kind}")
        try:
            yield span
        except BaseException as error:
            span.attributes["error"] = repr(error)
            raise
        finally:
            span.end = clock.now()
            del self.open[id(span)]
            self._spans.append(span)
            self._tell(f"ended {kind}")

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def _tell(self, event: str) -> None:
        for hear in self.heard:
            hear(event)

    def drain(self) -> list[Span]:
        """All spans since the last drain, oldest first."""
        spans, self._spans = self._spans, []
        return spans


class EventLog(RowFile):
    """Appends spans to `events.jsonl`. Steps that run again after a resume are there twice: both happened."""

    def write(self, spans: list[Span]) -> None:
        self.append(asdict(span) for span in spans)


def span_of(fields: dict[str, Any]) -> Span:
    """A span from the object of its line."""
    return Span(**{**fields, "samples": tuple(fields["samples"])})


def read_events(path: Path) -> list[Span]:
    """The spans of a run folder's `events.jsonl`."""
    return [span_of(fields) for fields in read_rows(path)]
