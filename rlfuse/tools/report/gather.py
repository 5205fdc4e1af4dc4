"""Collect the data of a run for a report; its size is bounded for any length and number of runs."""

from __future__ import annotations

import base64
import heapq
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlfuse.config.trainer import AlertsConfig
from rlfuse.events import Span, union
from rlfuse.observe.alerts import Alert, Alerts, bound_in_steps
from rlfuse.observe.idle import intervals_by_slot
from rlfuse.run_folder.reader import RunFolder
from rlfuse.run_folder.status import Status, read

TIMELINES, SLOWEST, SAMPLES, VALIDATED = 5, 15, 400, 400  # shared by all runs of a page
VALIDATIONS = 12  # per run, spread over its steps
TEXT, IMAGES = 4_000, 4 * 2**20  # maximum characters of a text; bytes of all images
ROWS, MARKS = 32, 1_500  # maximum slots of a timeline; intervals that a screen can resolve in a step
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Work and waiting of each slot, and the samples in flight, in one step."""

    step: int
    seconds: float
    rows: list[tuple[str, list[tuple[str, float, float]]]]  # (label, [(work or cause, start, seconds)])
    in_flight: list[tuple[float, int]]  # (second, samples being generated) at each change


@dataclass(frozen=True, slots=True)
class Generated:
    """One generated sample, from its arrival on an engine to its last token."""

    id: str
    step: int
    seconds: float
    tokens: int
    engines: tuple[str, ...]


class Row(Mapping[str, float]):
    """Row of `metrics.jsonl` with eight bytes per number, as a page may have many thousands of rows."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: dict[str, int], values: Iterable[float]):
        """Store a row. `places`: index of each metric, shared by rows with the same metrics."""
        self._places, self._values = places, array("d", values)

    def __getitem__(self, name: str) -> float:
        return self._values[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Data of one run."""

    run: RunFolder
    name: str  # unique on the page
    status: Status | None
    rows: list[Row]
    summary: dict[str, Any]
    lengths: dict[int, list[float]]  # step -> response tokens at QUANTILES
    slowest: list[Generated]
    timelines: list[Timeline]
    samples: list[dict[str, Any]]  # rows of `samples.jsonl` and, with `validation` true, of `validation.jsonl`
    alerts: list[tuple[int, Alert]]  # (step, alert), by the thresholds of the run

    @property
    def steps(self) -> list[Row]:
        """Rows of training steps, without the validation before the first step."""
        return [row for row in self.rows if row["step"] > 0]


def gather(run: RunFolder, name: str, sharing: int = 1) -> Gathered:
    """Read a run folder. `sharing`: number of runs on the page. Raises RunError for damaged files."""
    rows, steps = _rows(run), run.steps()
    chosen = _chosen_steps(steps, max(1, TIMELINES // sharing))
    numbers = "|".join(map(str, chosen)) or "none"
    interesting = re.compile(rf'"kind":"generate"|"step":(?:{numbers}),').search
    inside: dict[int, list[Span]] = {number: [] for number in chosen}
    generated = _Generation(max(1, SLOWEST // sharing))
    for span in run.spans(lambda line: interesting(line) is not None):
        step = steps.get(span.step)
        if step is None or span.start < step.start or span.end > step.end:
            continue  # validation, or a step that ran again after a resume
        if span.kind == "generate":
            generated.add(span)
        if span.step in inside:
            inside[span.step].append(span)
    generated.close()
    budget = _Budget(IMAGES // sharing)
    return Gathered(
        run,
        name,
        read(run.path),
        rows,
        run.summary(),
        dict(sorted(generated.lengths.items())),
        generated.slowest,
        [_timeline(steps[number], inside[number], run.slots, run.width) for number in chosen],
        _samples(run, budget, [row["step"] for row in rows if row["step"] > 0], max(1, SAMPLES // sharing))
        + _validated(run, budget, max(1, VALIDATED // sharing)),
        _alerts(run, rows),
    )


def _alerts(run: RunFolder, rows: Sequence[Row]) -> list[tuple[int, Alert]]:
    """Return the alerts that the thresholds of the run raise on its metrics."""
    rollout, data = run.config["rollout"], run.config["fusion"]["data"]
    drawn = (rollout["top_p"], rollout["top_k"], data, rollout.get("min_p", 0.0), rollout.get("quantization"))
    bound = bound_in_steps(
        run.config["model"]["dtype"], *drawn, run.config["algorithm"].get("old_log_probs", "trainer")
    )
    clip = run.config["actor"].get("grad_clip", 0.0)
    alerts = Alerts(AlertsConfig(**run.config.get("alerts", {})), rollout.get("n", 1), bound, clip)
    return [(int(row["step"]), alert) for row in rows if row["step"] > 0 for alert in alerts.check(row)]


def _chosen_steps(steps: Mapping[int, Span], most: int) -> list[int]:
    """Return the steps whose timelines are shown: the median first, then the two slowest, the first and the last."""
    by_time = sorted(steps, key=lambda number: steps[number].seconds)
    wanted = [*by_time[len(by_time) // 2 :][:1], *by_time[-1:], *sorted(steps)[-1:], *sorted(steps)[:1], *by_time[-2:]]
    return [*wanted[:1], *sorted({*list(dict.fromkeys(wanted))[1:most]})]


def _rows(run: RunFolder) -> list[Row]:
    places: dict[tuple[str, ...], dict[str, int]] = {}
    rows = []
    for row in run.iter_rows():
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        names = tuple(numbers)
        if names not in places:
            places[names] = {name: place for place, name in enumerate(names)}
        rows.append(Row(places[names], numbers.values()))
    return rows


class _Generation:
    """Response lengths of every step and the slowest samples of the run, from spans in the order of steps.

    Spans of a step are written together, so at most two steps are in memory.
    """

    def __init__(self, most: int):
        self.lengths: dict[int, list[float]] = {}
        self.slowest: list[Generated] = []
        self._most = most
        self._open: dict[int, dict[str, list[Span]]] = {}

    def add(self, span: Span) -> None:
        if span.step not in self.lengths:
            self._open.setdefault(span.step, defaultdict(list))[span.samples[0]].append(span)
        if len(self._open) > 2:
            self._end(next(iter(self._open)))

    def close(self) -> None:
        for step in list(self._open):
            self._end(step)

    def _end(self, step: int) -> None:
        whole = [_whole(name, parts) for name, parts in self._open.pop(step).items()]
        self.lengths[step] = np.quantile([sample.tokens for sample in whole], QUANTILES).tolist()
        self.slowest = heapq.nlargest(self._most, [*self.slowest, *whole], key=lambda each: each.seconds)


def _whole(name: str, parts: Sequence[Span]) -> Generated:
    """Merge the spans of a sample that moved between engines; the last one counts the tokens it arrived with, too."""
    tokens = max(part.tokens + part.attributes.get("carried_tokens", 0) for part in parts)
    start, end = min(part.start for part in parts), max(part.end for part in parts)
    engines = tuple(part.where for part in sorted(parts, key=lambda part: part.start))
    return Generated(name, parts[0].step, end - start, tokens, engines)


def _timeline(step: Span, spans: Sequence[Span], slots: int, width: int) -> Timeline:
    shown = sorted({i * slots // min(slots, ROWS) for i in range(min(slots, ROWS))})
    divided = intervals_by_slot(spans, step.start, step.end, slots, width)
    rows = [(f"slot {slot}", _bars(divided[slot].items(), step)) for slot in shown]
    rewards = union(span for span in spans if span.where.startswith("reward/") and span.kind == "reward")
    if rewards:
        rows.append(("rewards", _bars([("busy/reward", rewards)], step)))
    changes = sorted(
        (time - step.start, change)
        for span in spans
        if span.kind == "generate"
        for time, change in ((span.start, 1), (span.end, -1))
    )
    in_flight, count = [(0.0, 0)], 0
    for time, change in changes:
        count += change
        if in_flight[-1][0] > time - step.seconds / MARKS and len(in_flight) > 1:
            in_flight.pop()  # closer than a screen can resolve
        in_flight.append((time, count))
    return Timeline(step.step, step.seconds, rows, in_flight)


def _bars(claims: Iterable[tuple[str, list[tuple[float, float]]]], step: Span) -> list[tuple[str, float, float]]:
    """Return bars relative to the start of the step; bars of a kind are merged if the gap is not visible."""
    finest, bars = step.seconds / MARKS, []
    for what, intervals in claims:
        joined: list[list[float]] = []
        for start, end in intervals:
            if joined and start - joined[-1][1] < finest:
                joined[-1][1] = end
            else:
                joined.append([start, end])
        bars += [(what, start - step.start, end - start) for start, end in joined if end - start >= finest / 4]
    return bars


@dataclass(slots=True)
class _Budget:
    """Bytes that are left for images."""

    bytes: int
    seen: set[Path] = field(default_factory=set)

    def picture(self, folder: Path, name: str | None) -> str | None:
        """Return a PNG or JPEG of the run folder as a data URI; None if it is missing, too large or used already.

        The responses to a prompt share one image, which the first of them has.
        """
        path = (folder / name).resolve() if name else None
        if path is None or path in self.seen or not path.is_file() or not path.is_relative_to(folder.resolve()):
            return None
        self.seen.add(path)
        if path.stat().st_size > self.bytes:
            return None
        self.bytes -= path.stat().st_size
        kind = "png" if path.suffix == ".png" else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _samples(run: RunFolder, budget: _Budget, steps: Sequence[float], most: int) -> list[dict[str, Any]]:
    chosen = set(_spread(steps, max(1, most // max(1, run.config["trainer"].get("log_samples", 1)))))
    rows = (row for row in run.samples() if row["step"] in chosen)
    return [_shown_row(run, budget, row) for row in islice(rows, most)]


def _validated(run: RunFolder, budget: _Budget, most: int) -> list[dict[str, Any]]:
    """Return rows of `validation.jsonl`: the same prompts at several steps, so that responses can be compared."""
    every: list[float] = []
    last = Counter[tuple[str, str]]()
    for row in run.validation_rows():  # in ascending order of steps
        if row["step"] not in every[-1:]:
            every.append(row["step"])
            last.clear()
        last[_question(row)] += 1
    if not every:
        return []
    steps = _spread(every, VALIDATIONS)
    questions = list(last)[: max(1, most // len(steps) // max(last.values()))]
    rows = (row for row in run.validation_rows() if row["step"] in steps and _question(row) in questions)
    return [_shown_row(run, budget, row) | {"validation": True} for row in islice(rows, most)]


def _question(row: dict[str, Any]) -> tuple[str, str]:
    """Return (row of the data, text), which identify a prompt in all validations; clips may share the text."""
    return row["id"].split("/")[1], row["prompt"]


def _spread(steps: Sequence[float], count: int) -> list[float]:
    """Return at most `count` steps, evenly spread, including the last."""
    places = np.linspace(len(steps) - 1, 0, min(count, len(steps))).round().astype(int)
    return [steps[place] for place in sorted(set(places))]


def _shown_row(run: RunFolder, budget: _Budget, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without data columns, with truncated texts and its image."""
    texts = {name: truncate_text(row[name]) for name in ("prompt", "response")}
    kept = {name: value for name, value in row.items() if name not in ("columns", "contact_sheet")}
    return kept | texts | {"picture": budget.picture(run.path, row.get("contact_sheet"))}


def truncate_text(text: str) -> str:
    """Return at most `TEXT` characters of the text, and the number of characters left out."""
    return text if len(text) <= TEXT else f"{text[:TEXT]}\n… {len(text) - TEXT:,} more characters in samples.jsonl"
