"""Draw the calibration of a reward model, and write its `summary.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlfuse.algorithms.preferences import Calibration
from rlfuse.config.reward_labels import saved_labels
from rlfuse.config.rewards import MODEL_PART
from rlfuse.files import write_atomically
from rlfuse.observe.live import figure
from rlfuse.observe.summary import outcome
from rlfuse.observe.tracking import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "calibration.png"
ACCURACY = f"val-core/{MODEL_PART}/acc"


def draw_calibration(path: Path, found: Calibration, gaps: np.ndarray) -> None:
    """Draw the reliability diagram next to the histogram of gaps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_reliability(left, found)
    left.set(xlabel="confidence, sigmoid(|gap|)")
    right.hist(gaps, bins=40, color="tab:blue", alpha=0.8)
    right.axvline(0, color="black", linestyle=":")
    right.set(xlabel="gap: score of chosen minus rejected", ylabel="pairs")
    right.set_title(f"mean gap {gaps.mean():.2f}", fontsize=9)
    figure.savefig(path, dpi=120)


def draw_reliability(axes: Axes, found: Calibration) -> None:
    """Draw the accuracy by confidence, with the number of pairs at the bottom of each bar."""
    middles, width = (found.edges[1:] + found.edges[:-1]) / 2, found.edges[1] - found.edges[0]
    axes.bar(middles, found.accuracies, width * 0.94, color="tab:blue", alpha=0.8, label="accuracy")
    axes.plot([0.5, 1], [0.5, 1], color="black", linestyle=":", label="perfect calibration")
    axes.plot(found.confidences, found.accuracies, color="tab:red", marker=".", linestyle="", label="mean confidence")
    for middle, count in zip(middles, found.counts, strict=True):
        axes.annotate(str(count), (middle, 0.02), ha="center", fontsize=7)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0.5, 1), ylim=(0, 1.02))
    pairs = f"{found.counts.sum()} held-out pairs: accuracy {found.accuracy:.3f}, ECE {found.ece:.3f}"
    axes.set_title(pairs, fontsize=9)
    axes.legend(fontsize=7, loc="upper left")


def summarise_reward_model(folder: Path, seconds: float) -> dict[str, Any]:
    """Write and print `summary.json` of the training of a reward model; return the summary."""
    weights = max(
        folder.glob(f"global_step_*/{MODEL_PART}/huggingface"), key=lambda path: path.stat().st_mtime, default=None
    )
    summary = outcome(read_metrics(folder / "metrics.jsonl"), ACCURACY, seconds)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2))
    print(_text(summary, folder, weights))
    return summary


def _text(summary: dict[str, Any], folder: Path, weights: Path | None) -> str:
    lines = [
        f"{summary['steps']} steps in {summary['seconds']:.0f} s",
        f"  held-out pairs {figure(summary['val_before'])} -> {figure(summary['val_after'])}   (accuracy)",
    ]
    if (ece := summary["metrics"].get(f"val-aux/{MODEL_PART}/ece")) is not None:
        lines.append(f"  calibration   {ece:.3f}   (expected calibration error)")
    lines += [f"  run folder    {folder}", f"  results       {PICTURE}, metrics.jsonl, summary.json"]
    if weights is not None:
        labels, _ = saved_labels(weights)
        entries = ",".join(f"{MODEL_PART}:{label}" for label in labels) if len(labels) > 1 else ""
        functions = f" 'reward.functions=[{entries}]'" if entries else ""
        lines += [
            f"  model         {weights}",
            f"  use it        rlfuse train ... reward.model_path={weights}{functions}",
        ]
    return "\n".join(lines)
