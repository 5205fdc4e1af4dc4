"""Plot rewards, comparisons, metrics and time. Each function returns new matplotlib axes."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rlfuse.observe.idle import intervals_by_slot
from rlfuse.run_folder.reader import RunError, open_run
from rlfuse.tools.dataframes import metrics, time_spent
from rlfuse.tools.evaluation.comparison import Comparison

BINS = 20
IDLE, BUSY = "#c9c4bd", "#3f7fb5"


def plot_rewards(*tables: pd.DataFrame, labels: tuple[str, ...] = ()) -> Axes:
    """Plot a histogram of the rewards of one or more tables; the legend counts samples without a reward."""
    axes = new_axes()
    rewards = [table["reward"].dropna().to_numpy(float) for table in tables]
    names = labels or tuple(f"reward {number}" for number in range(1, len(tables) + 1))
    if len(names) != len(tables):
        raise ValueError(f"labels: got {len(names)} for {len(tables)} tables; pass one per table, or none")
    legend = [
        f"{name}{f' ({len(table) - len(values)} without)' if len(table) > len(values) else ''}"
        for name, table, values in zip(names, tables, rewards, strict=True)
    ]
    every = np.concatenate(rewards)
    edges = np.histogram_bin_edges(every, BINS) if len(every) else BINS
    axes.hist(rewards, bins=edges, label=legend)
    axes.set(xlabel="reward", ylabel="samples")
    axes.legend()
    return axes


def plot_comparison(found: Comparison) -> Axes:
    """Plot each sample by its two rewards, slightly jittered; samples with flipped advantage in another colour."""
    axes = new_axes(width=4.5, height=4.0)
    jitter = np.random.default_rng(0).normal(0, 0.012, (2, len(found.samples)))
    for advantage_flipped, colour, label in (
        (False, BUSY, "advantage unchanged"),
        (True, "#c2385a", "advantage_flipped"),
    ):
        chosen = (found.samples["advantage_flipped"] == advantage_flipped).to_numpy()
        spread = [
            found.samples[name][chosen] + jitter[i, chosen] * max(np.ptp(found.samples[name]), 1e-9)
            for i, name in enumerate(("before", "after"))
        ]
        axes.scatter(*spread, s=12, alpha=0.5, color=colour, label=f"{label} ({chosen.sum()})")
    axes.set(xlabel="before", ylabel="after")
    axes.legend()
    return axes


def plot_metrics(run: str | Path, *names: str) -> Axes:
    """Plot metrics of metrics.jsonl over steps, on one axis."""
    table, axes = metrics(run), new_axes()
    for name in names:
        if name not in table:
            near = [column for column in table if name.split("/")[-1] in column][:5]
            raise ValueError(f"{name} is not in {run}/metrics.jsonl; similar: {near}. See metrics(run).columns")
        table[name].dropna().plot(ax=axes, marker=".", label=name)
    axes.set(xlabel="step")
    axes.legend()
    return axes


def plot_time(run: str | Path, first: int = 1, most: int = 8) -> Axes:
    """Plot seconds per slot and step from `first` on: busy in blue, idle in grey, with the `most` largest parts."""
    spent = time_spent(run)
    spent = spent[spent.index >= first]
    order, shown = list(spent.sum().sort_values(ascending=False).index), {}
    for side, shades, darkest in (("busy", "Blues", 0.85), ("idle", "Greys", 0.5)):
        mine = [name for name in order if name.startswith(f"{side}/")]
        parts = {name: spent[name] for name in mine if name in order[:most]}
        if len(parts) < len(mine):
            parts[f"{side}, other"] = spent[[name for name in mine if name not in parts]].sum(axis=1)
        colours = plt.get_cmap(shades)(np.linspace(darkest, 0.15, max(1, len(parts))))
        shown |= {name: (parts[name], colour) for name, colour in zip(parts, colours, strict=False)}
    axes = new_axes()
    bottom = np.zeros(len(spent))
    for name, (seconds, colour) in shown.items():
        axes.bar(spent.index, seconds, bottom=bottom, color=colour, label=name, width=0.85)
        bottom += seconds.to_numpy()
    axes.set(xlabel="step", ylabel="seconds per slot")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes


def plot_step(run: str | Path, step: int) -> Axes:
    """Plot the activities of each slot in one step; idle time is grey."""
    folder = open_run(Path(run))
    whole = folder.steps().get(step)
    if whole is None:
        raise RunError(f"{run}: step {step} is not in events.jsonl; available: {sorted(folder.steps())}")
    spans = list(folder.spans(lambda line: f'"step":{step},' in line, [step]))
    slots = intervals_by_slot(spans, whole.start, whole.end, folder.slots, folder.width)
    kinds = sorted({name for slot in slots for name in slot if name.startswith("busy/")})
    colours = dict(zip(kinds, plt.get_cmap("tab10").colors, strict=False))
    axes = new_axes(height=1.5 + 0.4 * len(slots))
    for row, slot in enumerate(slots):
        for name, intervals in slot.items():
            bars = [(start - whole.start, end - start) for start, end in intervals]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colours.get(name, IDLE))
    axes.set(xlabel="seconds", yticks=range(len(slots)), yticklabels=[f"slot {row}" for row in range(len(slots))])
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in [*colours.values(), IDLE]]
    names = [*(kind.removeprefix("busy/") for kind in kinds), "idle"]
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4)
    return axes


def new_axes(width: float = 7.0, height: float = 3.0) -> Axes:
    """Return new matplotlib axes of this size in inches."""
    _, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return axes
