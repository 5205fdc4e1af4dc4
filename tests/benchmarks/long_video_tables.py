"""Combine results of `long_video_steps.py` into tables and a picture.

python tests/benchmarks/long_video_tables.py some.json more.json --picture long_video_steps.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

PARTS = ("encode", "rollout", "old", "ref", "update")
"""Parts of a step."""
COLOURS = {"none": "#8a8a8a", "once": "#6aa3d8", "once, 2 ranks": "#f0a830", "ours": "#c2385a"}
LABELS = ("nothing reused", "encoded once, degree 1", "encoded once, degree 2", "ours: encoded once, degree chosen")
PASSES = PARTS[2:]
"""Parts of the trainer, which depend on the degree."""
FIXED = ("once", "once, 2 ranks")
TWICE = ("encoded / unique", "run / unique")
"""Clip tokens run by the encoder, and tokens of prompt and responses run by passes without gradients."""


def middle(steps: Sequence[dict[str, Any]], parts: Sequence[str] = PARTS) -> float:
    """Return the median of the total seconds of these parts."""
    return statistics.median(sum(step["parts"][part] for part in parts) for step in steps)


def over(steps: dict[str, Any], parts: Sequence[str] = PARTS) -> float:
    """Return the ratio of the chosen degree to the best fixed degree."""
    return middle(steps["ours"], parts) / min(middle(steps[way], parts) for way in FIXED)


def show(found: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    titles = ["frames", "tokens", *(f"{way}, s" for way in COLOURS), "over envelope: step", "passes", "degrees"]
    titles += ["none / ours", *(f"{name}, {way}" for name in TWICE for way in ("none", "ours")), "padding", "KiB sent"]
    rows = []
    for frames, steps in found["steps"].items():
        took, last = {way: middle(steps[way]) for way in COLOURS}, steps["ours"][-1]
        cells = [str(frames), str(last["tokens"]), *(f"{took[way]:.2f}" for way in COLOURS)]
        cells += [f"{over(steps):.2f}", f"{over(steps, PASSES):.2f}", " / ".join(map(str, last["degrees"]))]
        cells += [f"{took['none'] / took['ours']:.1f}"]
        cells += [f"{steps[way][-1][name]:.2f}" for name in TWICE for way in ("none", "ours")]
        cells += [f"{last['padding'] / last['needed']:.3%}", f"{last['bytes'] / 1024:.0f}"]
        rows.append(cells)
    draw(console, titles, rows)
    parts = [
        [str(frames), way, *(f"{middle(steps[way], [part]):.2f}" for part in PARTS)]
        for frames, steps in found["steps"].items()
        for way in COLOURS
    ]
    draw(console, ["frames", "way", *(f"{part}, s" for part in PARTS)], parts)
    if found["memory"]:
        draw(console, ["degree", "MiB of a rank"], [[str(d), f"{mib:.0f}"] for d, mib in found["memory"].items()])


def draw(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*titles, box=box.MARKDOWN)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def picture(found: dict[str, Any], path: Path) -> None:
    """Plot the seconds of a step by frames, both axes logarithmic."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for way, label in zip(COLOURS, LABELS, strict=True):
        took = {frames: middle(steps[way]) for frames, steps in found["steps"].items()}
        width = 3 if way == "ours" else 1.5
        axes.plot(list(took), list(took.values()), "o-", color=COLOURS[way], label=label, linewidth=width, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="frames", ylabel="seconds of a step")
    axes.set_xticks(list(found["steps"]), [str(frames) for frames in found["steps"]], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON of runs; of a length found twice the last counts")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    together: dict[str, Any] = {"steps": {}, "memory": {}}
    for file in options.files:
        run = json.loads(file.read_text())
        together["steps"] |= {int(frames): steps for frames, steps in run["steps"].items()}
        together["memory"] |= run["memory"]
    together["steps"] = dict(sorted(together["steps"].items()))
    show(together, Console(width=240))
    if options.picture:
        picture(together, options.picture)
