"""Draw the calibration of a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlfuse.algorithms.preferences import Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "calibration.png"


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
