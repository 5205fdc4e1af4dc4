"""Render the live view of a run: stages, slots, samples in flight, reward, remaining time.

`read_board` runs in the thread of the view: it only reads, and copies each container in one operation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlfuse.clock import now as epoch_now
from rlfuse.events import Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Slot
from rlfuse.step.scoring import PASSES

ROWS = 16
"""Maximum lines of slots and of starting components; larger numbers are summarised as counts."""
SHOWN_STEPS = 24
BETWEEN = "between steps"
PHASES = {
    "start": "starting",
    "testing": "validating",
    "save_checkpoint": "writing a checkpoint",
    "update_weights": "updating engine weights",
    "step": "training step",
}
COLOURS = {"generate": "dodger_blue1", "reward": "deep_pink3", "train": "green3", "idle": "grey50", "lost": "red"}
COLOURS["drained"] = COLOURS["idle"]
SCORING = "orange3"
BAR = 16
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Stage:
    """Progress of one kind of work, in samples or optimizer steps."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class View:
    """Contents of the live view, as plain data."""

    name: str
    step: int
    total: int
    elapsed_s: float
    remaining_s: float | None
    phase: str
    stages: Sequence[Stage]
    slots: Sequence[tuple[str, int]]
    in_flight: int
    rewards: Sequence[float]
    figures: Mapping[str, str]
    starting: Sequence[tuple[str, float]] = ()


def read_board(board: Board | None, spans: Iterable[Span]) -> tuple[str, list[Stage], list[tuple[str, int]], int]:
    """Return the current (phase, stages, slots, samples in flight). `spans`: open spans of the driver."""
    spans = list(spans)
    kinds = {span.kind for span in spans}
    phase = next((text for kind, text in PHASES.items() if kind in kinds), BETWEEN)
    if any(span.kind == "testing" and span.cause == "weights" for span in spans):
        phase = "comparing engines and trainer"
    if board is None or not kinds & {"step", "testing"}:
        return phase, [], [], 0
    samples = list(board.samples.values())
    stages = [Stage("generate", sum(sample.response is not None for sample in samples), len(samples))]
    for kind in board.kinds:
        if kind == "reward":
            stages.append(Stage(kind, sum(sample.reward is not None for sample in samples), len(samples)))
        else:
            trained = [record for record in board.records.values() if record.trains and record.group.chosen]
            done = sum(each.skipped or PASSES[kind][1] in each.sample.tensors for each in trained)
            stages.append(Stage(kind, done, len(trained)))
    stages += [
        Stage(f"train {model}", progress.completed, progress.steps) for model, progress in board.mini_batches.items()
    ]
    slots = [(_doing(place, spans), place.load) for place in board.slot_table.slots]
    return phase, stages, slots, board.slot_table.in_flight


def starting_parts(spans: Iterable[Span]) -> list[tuple[str, float]]:
    """Return (component, seconds so far) for each component that is starting. `spans`: open spans of the driver."""
    now = epoch_now()
    return [(span.cause, now - span.start) for span in spans if span.kind == "start" and span.cause != "run"]


def log_line(view: View) -> str:
    """Return a status line for logs without a live view."""
    parts = [f"{name} {seconds:.0f} s" for name, seconds in view.starting[:ROWS]]
    parts += [f"{stage.name} {stage.done}/{stage.total}" for stage in view.stages]
    return f"… {view.phase}, {clock(view.elapsed_s)} elapsed{': ' if parts else ''}{', '.join(parts)}"


def _doing(place: Slot, spans: Sequence[Span]) -> str:
    if not place.alive:
        return "lost"
    if place.load:
        return "generate"
    work = (*PASSES, "switch", "update_actor", "update_critic")
    own = [s.kind for s in spans if s.kind in work and s.attributes.get("slot", place.index) == place.index]
    return own[0].replace("update_", "train ") if own else "drained" if place.drained else "idle"


def render(view: View) -> RenderableType:
    """Return the panel that the terminal shows."""
    left = "" if view.remaining_s is None else f", about {clock(view.remaining_s)} left"
    head = Table.grid(expand=True, padding=(0, 2))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(
        Text(f"step {view.step}/{view.total}", "bold"),
        ProgressBar(max(view.total, 1), view.step, complete_style="green3"),
        Text(f"{clock(view.elapsed_s)} elapsed{left}"),
    )
    body = Table.grid(padding=(0, 4))
    body.add_row(_stages(view), _slots(view))
    parts = [head, Text(), body] if view.stages else [head]
    if view.starting:
        parts += [Text(), _starting(view.starting)]
    if view.rewards:
        values = "   ".join(f"{name} {value}" for name, value in view.figures.items())
        parts += [Text(), Text.assemble((sparkline(view.rewards), "green3"), f"   {values}", overflow="ellipsis")]
    title = Text.assemble(("rlfuse", "bold"), f"  {view.name}  ·  {view.phase}")
    return Panel(Group(*parts), title=title, title_align="left", border_style="grey50")


def _starting(parts: Sequence[tuple[str, float]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="grey50")
    for name, seconds in parts[:ROWS]:
        table.add_row(Text(f"… {name}"), f"{seconds:.0f} s")
    if len(parts) > ROWS:
        table.add_row(f"… and {len(parts) - ROWS} more", "")
    return table


def _stages(view: View) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=BAR)
    table.add_column(justify="right", no_wrap=True)
    for stage in view.stages:
        bar = ProgressBar(max(stage.total, 1), stage.done, width=BAR, complete_style=_colour(stage.name))
        table.add_row(Text(stage.name), bar, f"{stage.done}/{stage.total}")
    return table


def _slots(view: View) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="grey50")
    table.add_column(no_wrap=True)
    if len(view.slots) <= ROWS:
        for number, (doing, samples) in enumerate(view.slots):
            load = f"  {samples} samples" if samples else ""
            table.add_row(f"slot {number}", Text.assemble((doing, _colour(doing)), load))
    else:
        for doing, count in Counter(doing for doing, _ in view.slots).most_common():
            table.add_row(f"{count} slots", Text(doing, _colour(doing)))
    table.add_row("", f"{view.in_flight} samples in flight")
    return table


def _colour(doing: str) -> str:
    return COLOURS.get(doing.split()[0], SCORING)


def sparkline(values: Sequence[float], width: int = SHOWN_STEPS) -> str:
    """Return the last values as a bar chart of one line, scaled from the lowest to the highest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 3] for value in shown)


def figure(value: float | None, form: str = ".3f") -> str:
    """Format a number; "-" for None and NaN."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
