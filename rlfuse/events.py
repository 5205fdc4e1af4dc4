"""Typed spans of work, the only source of traces, idle accounting and reports.

Role: each process has one `Recorder`; after a step the driver drains them all and appends the spans to `events.jsonl`
in the run folder. Times are seconds since the epoch by the recording process's `clock`.

    events.jsonl                               the latest steps; rotated into a part once it is long
    events/00003-steps-641-1280.jsonl.gz       the third part, compressed; without .gz during compression

Invariants: every span is in exactly one file, also if the driver is killed or the disk is full during a rotation, and a
concurrent reader reads each span once.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rlfuse import clock
from rlfuse.errors import RunError
from rlfuse.files import RowFile, atomic_write, read_rows, sync

PARTS, PART = "events", re.compile(r"-steps-(-?\d+)-(-?\d+)\.jsonl")
PART_BYTES = 64 << 20
COMPRESSION = 3
"""Level of gzip: recorded runs become 9x smaller, in one second per part."""
Intervals = list[tuple[float, float]]
"""(start, end) in seconds, ascending and disjoint."""


@dataclass(slots=True)
class Span:
    """One piece of work: kind, place, time, samples, tokens and cause."""

    kind: str
    """`generate reward old_log_prob ref values forward backward optimizer update_weights data checkpoint ...`."""
    where: str
    """Process or slot: `rollout/0`, `trainer/1`, `reward/0`, `driver`."""
    start: float
    end: float = 0.0
    step: int = -1
    samples: tuple[str, ...] = ()
    tokens: int = 0
    cause: str = ""
    """Trigger: a policy decision, a finished sample, an optimizer step."""
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


def union(spans: Iterable[Span]) -> Intervals:
    """Return the intervals that at least one of the spans covers."""
    joined: Intervals = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds covered by at least one of the spans."""
    return sum(end - start for start, end in union(spans))


class Recorder:
    """Spans of one process, kept until drained. Not thread-safe."""

    def __init__(self, where: str):
        self.where = where
        self.step = -1
        self.open: dict[int, Span] = {}
        """Unfinished spans, oldest first."""
        self.listeners: list[Callable[[str], Any]] = []
        """Each is called with `began KIND` and `ended KIND`."""
        self._spans: list[Span] = []

    @contextmanager
    def span(self, kind: str, **fields: Any) -> Iterator[Span]:
        """Record the body as a span, also if it raises. The body may set fields of the yielded span."""
        span = Span(kind, self.where, clock.now(), step=fields.pop("step", self.step), **fields)
        self.open[id(span)] = span
        self._notify(f"began {kind}")
        try:
            yield span
        except BaseException as error:
            span.attributes["error"] = repr(error)
            raise
        finally:
            span.end = clock.now()
            del self.open[id(span)]
            self._spans.append(span)
            self._notify(f"ended {kind}")

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def _notify(self, event: str) -> None:
        for listener in self.listeners:
            listener(event)

    def drain(self) -> list[Span]:
        """Return all spans since the last call, oldest first."""
        spans, self._spans = self._spans, []
        return spans


class EventLog(RowFile):
    """Writer of `events.jsonl`. Steps that are repeated after a resume are recorded twice."""

    def write(self, spans: list[Span]) -> None:
        self.append(asdict(span) for span in spans)

    def rotate(self) -> None:
        """Move the rows into a part once they exceed PART_BYTES. On a full disk the file is left unchanged."""
        if self.size < PART_BYTES:
            return
        with suppress(OSError):
            number = max((int(name.partition("-")[0]) for name in _parts(self.path)), default=0) + 1
            steps = [int(step) for step in re.findall(rb'"step":(-?\d+),', self.path.read_bytes())]
            part = self.path.with_name(PARTS) / f"{number:05d}-steps-{min(steps)}-{max(steps)}.jsonl"
            part.parent.mkdir(exist_ok=True)
            self.path.rename(part)
            rows, self._file = self._file, self.path.open("ab", buffering=0)
            rows.close()
            for each in sorted(part.parent.glob("[0-9]*.jsonl")):  # also older ones that are not compressed yet
                _compress(each)


def _compress(part: Path) -> None:
    with (
        atomic_write(part.with_name(f"{part.name}.gz")) as aside,
        part.open("rb") as plain,
        gzip.open(aside, "wb", COMPRESSION) as packed,
    ):
        shutil.copyfileobj(plain, packed)
    sync(part.parent)
    part.unlink()


def _parts(path: Path) -> dict[str, Path]:
    """Return name -> file of each part, oldest first; `path`: `events.jsonl`."""
    found = sorted(path.with_name(PARTS).glob("[0-9]*.jsonl*"))
    return {part.name.removesuffix(".gz"): part for part in found}  # .gz comes last and wins


def read_spans(
    path: Path, wanted: Callable[[str], bool] = lambda line: True, steps: Collection[int] | None = None
) -> Iterator[Span]:
    """Yield the spans of a run folder's `events.jsonl` and its parts, oldest first.

    `wanted` filters lines before they are parsed, which takes most of the time; parts without any of `steps` are
    skipped. RunError for damaged files.
    """
    done: set[str] = set()
    while True:
        with _opened(path) as current:  # opened first: it may be rotated meanwhile
            parts = _parts(path)
            if (name := next((name for name in parts if name not in done), None)) is None:
                yield from map(span_of, read_rows(path, wanted, current))
                return
        done.add(name)
        first, last = map(int, PART.findall(name)[0])
        if steps is not None and not any(first <= step <= last for step in steps):
            continue
        try:
            yield from map(span_of, read_rows(parts[name], wanted))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise RunError(f"{parts[name]} is damaged ({error}); remove it to read the other steps") from error


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return io.BytesIO()


def span_of(fields: dict[str, Any]) -> Span:
    """Return the span of a parsed row."""
    return Span(**{**fields, "samples": tuple(fields["samples"])})


def read_events(path: Path) -> list[Span]:
    """Return all spans of a run folder's `events.jsonl` and its parts."""
    return list(read_spans(path))
