"""Draw measured against predicted seconds of held-out work, a panel for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlfuse.files import replacing
from rlfuse.planning.calibration import Total
from rlfuse.planning.hardware import KINDS

HUES = ("#6aa3d8", "#f0b45c", "#7fbf9b", "#b39ad6", "#d98880", "#8c8c8c")
"""Of the runs, one after the other."""
INK, BAND = "#2b2b2b", "#e4e4e4"


def draw(found: Sequence[Total], title: str, path: Path) -> None:
    """As a PNG."""
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    sources = list(dict.fromkeys(total.source for total in found))
    for axes, kind in zip(figure.subplots(1, len(KINDS)), KINDS, strict=True):
        _panel(axes, kind, [total for total in found if total.kind == kind], sources)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, labelcolor=INK)
    with replacing(path) as aside:
        figure.savefig(aside, format=path.suffix[1:], dpi=110)


def _panel(axes: Axes, kind: str, found: Sequence[Total], sources: Sequence[str]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("measured, s", color=INK)
    axes.set_ylabel("predicted, s", color=INK)
    if not found:
        axes.set_title(f"{kind}: none seen", loc="left", color=INK, fontsize=10)
        return
    error = sum(total.error for total in found) / len(found)
    axes.set_title(f"{kind}: off by {error:.1%} in the mean", loc="left", color=INK, fontsize=10)
    seconds = [each for total in found for each in (total.measured, total.predicted)]
    ends = [min(seconds) / 1.3, max(seconds) * 1.3]
    axes.fill_between(ends, [end * (1 - error) for end in ends], [end * (1 + error) for end in ends], color=BAND)
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for place, source in enumerate(sources):
        mine = [total for total in found if total.source == source]
        hue = HUES[place % len(HUES)]
        axes.scatter(*zip(*((t.measured, t.predicted) for t in mine), strict=True), s=26, color=hue, label=source)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
