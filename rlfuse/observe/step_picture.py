"""Draw timelines of steps, simulated or from the events of a run, with a row per slot, as one PNG."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlfuse.events import Span, span_of
from rlfuse.observe.schedule_picture import IDLE, INK, frame, legend, save

GENERATING = LinearSegmentedColormap.from_list("generating", ["#c9def2", "#6aa3d8", "#1d5c9e", "#0c3260"])
"""Colours from a batch of one sample to the largest batch."""
COLOURS = {
    "scoring": "#f0a830",
    "training": "#3f9e6e",
    "optimizer": "#1e5c3c",
    "switching": "#b9b4ad",
    "weights": "#9d86c4",
}
KINDS = {
    "old_log_prob": "scoring",
    "ref": "scoring",
    "values": "scoring",
    "forward": "training",
    "backward": "training",
    "head": "training",
    "weight_gradients": "training",
    "optimizer": "optimizer",
    "update_weights": "weights",
}
MOVING = "#c2385a"
MAX_ROWS = 32
MAX_COLUMNS = 9  # of the legend, which is truncated otherwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """Step to draw."""

    title: str
    note: str  # in small print, to the right of the title
    spans: Sequence[Span]
    start: float  # by the clock of the spans; drawn at 0
    seconds: float  # of the step
    bound: float | None = None  # lower bound of the time of any schedule, in seconds


@dataclass(frozen=True, slots=True)
class Bar:
    """One activity of a slot over an interval."""

    slot: int
    start: float
    end: float
    what: str
    batch: float = 0.0


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Write the PNG. Raises ValueError if there are no spans of engines or ranks."""
    bars = [list(activity(timeline)) for timeline in timelines]
    slots = 1 + max((bar.slot for each in bars for bar in each), default=-1)
    if not slots:
        raise ValueError("nothing to draw: none of the steps has a span of a rollout engine or a trainer rank")
    shown = _rows(slots)
    largest = max((bar.batch for each in bars for bar in each), default=1.0)
    height = max(0.9, 0.115 * len(shown) + 0.35)
    figure = Figure(figsize=(12.0, height * len(timelines) + 1.35), layout=ConstrainedLayoutEngine(hspace=0.05))
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline, each in zip(panels, timelines, bars, strict=True):
        _panel(axes, timeline, each, shown, Normalize(0, largest))
    panels[-1].set_xlabel("seconds", color=INK)
    panels[-1].set_xlim(0, 1.01 * max(timeline.seconds for timeline in timelines))
    note = "one row per slot" if len(shown) == slots else f"{len(shown)} of {slots:,} slots"
    seen = {bar.what for each in bars for bar in each}
    seen |= {"moving"} if any(map(_moves, timelines)) else set()
    seen |= {"bound"} if any(timeline.bound is not None for timeline in timelines) else set()
    _legend(figure, seen, largest, note)
    save(figure, path)


def draw_step(path: Path, events: Path, first: int, last: int, note: str) -> None:
    """Draw a step of a run. Its spans are the rows of `events` from byte `first` to byte `last`."""
    with events.open("rb") as file:
        file.seek(first)
        spans = [span_of(json.loads(line)) for line in file.read(last - first).splitlines()]
    whole = next(span for span in spans if span.kind == "step" and span.where == "driver")
    path.parent.mkdir(exist_ok=True)
    draw([Timeline(f"step {whole.step}   {whole.seconds:.2f} s", note, spans, whole.start, whole.seconds)], path)


def _rows(slots: int) -> dict[int, int]:
    """Return slot -> row of the slots that are shown: all, or `MAX_ROWS` evenly spread ones."""
    count = min(slots, MAX_ROWS)
    return {slot: row for row, slot in enumerate(sorted({i * slots // count for i in range(count)}))}


def activity(timeline: Timeline) -> Iterable[Bar]:
    """Yield the bars of a step, clipped to it, in seconds from its start."""
    start, end = timeline.start, timeline.start + timeline.seconds
    stepwise = any(span.kind == "decode" for span in timeline.spans)
    bars = [bar for span in timeline.spans if (bar := _bar(span)) is not None]
    bars += [] if stepwise else _from_samples(timeline.spans)
    for bar in bars:
        if bar.end > start and bar.start < end and bar.end > bar.start:
            yield Bar(bar.slot, max(bar.start, start) - start, min(bar.end, end) - start, bar.what, bar.batch)


def _bar(span: Span) -> Bar | None:
    place, _, index = span.where.partition("/")
    if span.kind == "decode" and place == "rollout":
        return Bar(int(index), span.start, span.end, "generating", span.attributes["batch"])
    if span.kind == "switch":  # the driver records all switches; simulated ranks also record the one back
        slot = span.attributes["slot"] if place == "driver" else int(index)
        return Bar(slot, span.start, span.end, "switching")
    if span.kind in KINDS and place in ("rollout", "trainer"):
        return Bar(int(index), span.start, span.end, KINDS[span.kind])
    return None


def _from_samples(spans: Iterable[Span]) -> list[Bar]:
    """Return the bars of generation, from the arrival and end of each sample."""
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for span in spans:
        place, _, index = span.where.partition("/")
        if span.kind == "generate" and place == "rollout":
            changes[int(index)] += [(span.start, 1), (span.end, -1)]
    bars = []
    for slot, events in changes.items():
        batch, since = 0, 0.0
        for now, change in sorted(events):
            if batch and now > since:
                bars.append(Bar(slot, since, now, "generating", batch))
            batch, since = batch + change, now
    return bars


def _moves(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.kind == "move" and span.where == "driver"]


def _panel(axes: Axes, timeline: Timeline, bars: Sequence[Bar], rows: dict[int, int], shade: Normalize) -> None:
    per_row: dict[int, list[Bar]] = defaultdict(list)
    for bar in bars:
        if bar.slot in rows:
            per_row[rows[bar.slot]].append(bar)
    for row, each in per_row.items():
        axes.broken_barh(
            [(bar.start, bar.end - bar.start) for bar in each],
            (row - 0.43, 0.86),
            facecolors=[
                GENERATING(shade(bar.batch)) if bar.what == "generating" else COLOURS[bar.what] for bar in each
            ],
            linewidth=0,
        )
    lines = [
        [(span.start - timeline.start, rows[span.attributes["source"]]), (span.end - timeline.start, rows[target])]
        for span in _moves(timeline)
        if span.attributes["source"] in rows and (target := span.attributes["target"]) in rows
    ]
    axes.add_collection(LineCollection(lines, colors=MOVING, linewidths=0.8, alpha=0.7), autolim=False)
    axes.axvline(timeline.seconds, color=INK, linewidth=1.0)
    if timeline.bound is not None:
        axes.axvline(timeline.bound, color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.set_yticks([])
    frame(axes, len(rows), timeline.title, timeline.note)
    axes.grid(axis="x", color="#e6e3de", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(figure: Figure, seen: set[str], largest: float, note: str) -> None:
    patches: list[Artist] = [
        Patch(color=GENERATING(1 / max(largest, 1.0)), label="generating: batch of 1"),
        Patch(color=GENERATING(1.0), label=f"batch of {largest:.0f}"),
    ]
    patches += [Patch(color=colour, label=what) for what, colour in COLOURS.items() if what in seen]
    patches += [Line2D([], [], color=MOVING, label="samples moved to another engine")] if "moving" in seen else []
    patches += [IDLE]
    dashed = (0, (2, 2))
    patches += [Line2D([], [], color=INK, lw=1, ls=dashed, label="lower bound")] if "bound" in seen else []
    more: dict[str, Any] = {"columnspacing": 1.4, "title": note, "title_fontsize": 9, "alignment": "left"}
    legend(figure, patches, min(len(patches), MAX_COLUMNS), **more)
