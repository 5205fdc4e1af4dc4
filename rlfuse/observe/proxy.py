"""Optimising against a reward model: its score, and the truth that it stands for, over the steps of a run.

Role: the summary calls it at the end of a run; reads rows of `metrics.jsonl`. The truth is any reward that gives `acc`,
also at weight 0, where it is only watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlfuse.config.rewards import MODEL_PART

PICTURE = "proxy_and_truth.png"


def draw_proxy(folder: Path, rows: Sequence[dict[str, float]]) -> Path | None:
    """A reward model's score, which was optimised, and held-out `acc`, which it stands for; None where one is missing.

    Where the first rises and the second falls, the model is over-optimised (Gao et al. 2023, arXiv 2210.10760).
    """
    proxy = _first(rows, lambda name: name.startswith("val-") and f"/{MODEL_PART}/" in name)
    truth = _first(rows, lambda name: name.startswith("val-core/") and "/acc/" in name)
    sampled = f"rewards/{MODEL_PART}/mean"
    if proxy is None or truth is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    other = axes.twinx()
    lines = [*_line(axes, rows, proxy, "tab:orange", "s", f"reward model, held out: {proxy}")]
    lines += _line(axes, rows, sampled, "tab:orange", "", "reward model, sampled", alpha=0.5)
    lines += _line(other, rows, truth, "tab:blue", "o", f"truth, held out: {truth}")
    best = max((row for row in rows if truth in row), key=lambda row: row[truth])
    lines.append(other.axvline(best["step"], color="tab:blue", linestyle=":", label=f"best truth, step {best['step']}"))
    axes.set(xlabel="step")
    axes.set_ylabel("score of the reward model", color="tab:orange")
    other.set_ylabel("true score", color="tab:blue")
    other.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    figure.legend(handles=lines, fontsize=7, loc="outside lower center", ncols=2)
    figure.savefig(folder / PICTURE, dpi=120)
    return folder / PICTURE


def _first(rows: Sequence[dict[str, float]], wanted: Callable[[str], bool]) -> str | None:
    return next((name for row in rows for name in row if wanted(name)), None)


def _line(
    axes: Any, rows: Sequence[dict[str, float]], name: str, colour: str, marker: str, label: str, **more: Any
) -> list:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label, **more) if points else []
