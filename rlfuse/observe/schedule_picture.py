"""Draw schedules on a common time axis: a PNG, or a self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlfuse.files import atomic_write, write_atomically
from rlfuse.fusion.schedules.problem import Problem
from rlfuse.fusion.schedules.schedule import Timed

HUES = (
    {"F": "#a9cdec", "B": "#3f86c6", "W": "#16426f", "H": "#6f8fae"},
    {"F": "#f9d59a", "B": "#ec9a29", "W": "#9c5b06", "H": "#c4a26a"},
    {"F": "#b5dcc6", "B": "#3f9e6e", "W": "#1e5c3c", "H": "#7da98f"},
    {"F": "#d8cbe9", "B": "#8d72bd", "W": "#4d3580", "H": "#a596bd"},
)
WORDS = {"F": "forward", "B": "backward", "W": "weight gradient", "H": "head"}
LABELLED = 800  # maximum operations of a schedule that is drawn with micro-batch numbers
INK, PALE = "#2b2b2b", "#8a8a8a"
IDLE = Patch(facecolor="white", edgecolor=PALE, linewidth=0.5, label="idle")
TimedRows = tuple[tuple[Timed, ...], ...]


def draw(problem: Problem, schedules: Sequence[tuple[str, TimedRows]], path: Path, unit: str = "") -> None:
    """Draw schedules, given as (title, rows), on one time axis into a PNG or HTML file.

    `unit`: unit of the times; empty for the unit of the problem.
    """
    height = max(1.2, 0.17 * problem.devices + 0.5)
    figure = Figure(figsize=(12.0, height * len(schedules) + 0.9), layout="constrained")
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    hues = {model.name: HUES[i % len(HUES)] for i, model in enumerate(problem.models)}
    for axes, (title, rows) in zip(panels, schedules, strict=True):
        _panel(axes, f"{title}   {max(row[-1].end for row in rows):.6g} {unit}", rows, hues)
    panels[-1].set_xlabel(unit or "time, in the unit of the problem", color=INK)
    panels[-1].set_xlim(0, 1.01 * max(row[-1].end for _, rows in schedules for row in rows))
    kinds = [kind for kind in WORDS if any(each.operation.kind == kind for _, rows in schedules for each in rows[0])]
    patches = [Patch(color=hue[kind], label=f"{name}: {WORDS[kind]}") for name, hue in hues.items() for kind in kinds]
    legend(figure, [*patches, IDLE], len(kinds) * min(2, len(hues)) + 1)
    save(figure, path)


def _panel(axes: Axes, title: str, rows: TimedRows, hues: dict[str, dict[str, str]]) -> None:
    labelled = sum(map(len, rows)) <= LABELLED
    for device, row in enumerate(rows):
        bars, colours = [], []
        for each in row:
            bars.append((each.start, each.end - each.start))
            colours.append(hues[each.operation.model][each.operation.kind])
            if labelled:
                middle, dark = (each.start + each.end) / 2, each.operation.kind == "W"
                number, colour = str(each.operation.micro_batch), "white" if dark else INK
                axes.text(middle, device, number, ha="center", va="center", fontsize=5, color=colour, clip_on=True)
        axes.broken_barh(bars, (device - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.2)
    total = max(row[-1].end for row in rows)
    busy = sum(each.end - each.start for row in rows for each in row) / (total * len(rows))
    axes.axvline(total, color=INK, linewidth=1.0)
    axes.set_yticks([0, len(rows) - 1] if len(rows) > 1 else [0])
    axes.set_ylabel("device", color=PALE, fontsize=9)
    frame(axes, len(rows), title, f"idle {1 - busy:.1%}")


def frame(axes: Axes, rows: int, title: str, note: str) -> None:
    """Set up axes with rows from top to bottom, a title, and a note in small print."""
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=4)
    axes.set_title(note, loc="right", fontsize=9, color=PALE, pad=4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(colors=PALE, labelsize=9)


def legend(figure: Figure, handles: Sequence[Artist], columns: int, side: str = "upper", **more: Any) -> None:
    """Draw the legend outside of the panels."""
    figure.legend(
        handles=handles,
        loc=f"outside {side} left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.2,
        **more,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or, for the suffix .html, a self-contained HTML page, atomically."""
    if path.suffix != ".html":
        with atomic_write(path) as aside:
            figure.savefig(aside, format=path.suffix[1:], dpi=150)
        return
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(path.stem)}</title>'
        f"<body>{svg[svg.index('<svg') :]}</body></html>\n"
    )
    write_atomically(path, page)
