"""Plot a reward model's score against the true reward (`acc`) over the steps of one or several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlfuse.config.rewards import MODEL_PART
from rlfuse.observe.tracking import last_validation

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

PICTURE = "proxy_and_truth.png"
PROXY, TRUTH = "tab:orange", "tab:blue"
Rows = Sequence[dict[str, float]]


def draw_overoptimization(folder: Path, rows: Rows) -> Path | None:
    """Plot a reward model's score and held-out `acc`: diverging curves are over-optimisation (arXiv 2210.10760)."""
    if None in _names(rows):
        return None
    draw_overoptimization_panels({"": rows}, folder / PICTURE)
    return folder / PICTURE


def draw_overoptimization_panels(runs: Mapping[str, Rows], path: Path) -> None:
    """Draw a panel for each run, with shared axes. Raises ValueError if a run lacks model scores or `acc`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.5 + 3.5 * len(runs), 4), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharex=True, sharey=True)[0]
    others = [axes.twinx() for axes in panels]
    for axes, other, (title, rows) in zip(panels, others, runs.items(), strict=True):
        lines = _panel(axes, other, rows, title)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        other.set_ylim(0, 1.02)
        other.tick_params(labelright=other is others[-1])
    panels[0].set_ylabel("score of the reward model", color=PROXY)
    others[-1].set_ylabel("true accuracy", color=TRUTH)
    figure.legend(handles=lines, fontsize=7, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, other: Axes, rows: Rows, title: str) -> list[Artist]:
    proxy, truth = _names(rows)
    if proxy is None or truth is None:
        raise ValueError(f"{title}: the validation metrics lack a reward model score or the true acc")
    best = max((row for row in rows if truth in row), key=lambda row: row[truth])
    lines = _line(axes, rows, proxy, f"reward model, held out: {proxy}", color=PROXY, marker="s")
    lines += _line(axes, rows, f"rewards/{MODEL_PART}/mean", "reward model, sampled", color=PROXY, alpha=0.5)
    lines += _line(other, rows, truth, f"truth, held out: {truth}", color=TRUTH, marker="o")
    return [*lines, other.axvline(best["step"], color=TRUTH, linestyle=":", label="best true accuracy")]


def _names(rows: Rows) -> tuple[str | None, str | None]:
    means = [name for name in last_validation(rows) if "/mean@" in name]
    proxy = next((name for name in means if f"/{MODEL_PART}/" in name), None)
    return proxy, next((name for name in means if name.startswith("val-core/") and "/acc/" in name), None)


def _line(axes: Axes, rows: Rows, name: str, label: str, **style: object) -> list[Artist]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return axes.plot(*zip(*points, strict=True), label=label, **style) if points else []
