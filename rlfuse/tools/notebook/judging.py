"""Plot the verdicts of a judge: position bias, and confidence against accuracy."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rlfuse.algorithms.preferences import calibrate
from rlfuse.observe.calibration_plot import draw_reliability


def verdicts_by_order(scored: pd.DataFrame, name: str = "judge") -> pd.DataFrame:
    """Return P(response is better) if shown first, if shown second, and their mean, which is the reward."""
    mean, position = scored[f"rewards/{name}"].astype(float), scored[f"rewards/{name}/position"].astype(float)
    return pd.DataFrame({"shown first": mean + position - 0.5, "shown second": mean - position + 0.5, "mean": mean})


def plot_orders(scored: pd.DataFrame, right: pd.Series, name: str = "judge") -> Axes:
    """Plot the two probabilities of each response. `right`: above 0 if the response is actually better."""
    found = verdicts_by_order(scored, name)
    _, axes = plt.subplots(figsize=(4.5, 4.0), layout="constrained")
    for truth, colour, label in ((True, "#3f7fb5", "response is better"), (False, "#c2385a", "reference is better")):
        chosen = found[(right > 0) == truth]
        axes.scatter(chosen["shown first"], chosen["shown second"], s=12, alpha=0.5, color=colour, label=label)
    axes.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="no position bias")
    axes.plot([0, 1], [1, 0], color="grey", linewidth=1, label="mean 0.5")
    axes.set(xlabel="P(response), shown first", ylabel="P(response), shown second", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=7)
    return axes


def plot_confidence(probabilities: pd.Series, right: pd.Series) -> Axes:
    """Plot the accuracy of a judge against its confidence. `probabilities`: P(response is better)."""
    p = probabilities.to_numpy(float).clip(1e-6, 1 - 1e-6)
    gaps = np.log(p / (1 - p)) * np.where(right > 0, 1, -1)  # log-odds of the better answer
    _, axes = plt.subplots(figsize=(4.5, 3.4), layout="constrained")
    draw_reliability(axes, calibrate(gaps))
    return axes
