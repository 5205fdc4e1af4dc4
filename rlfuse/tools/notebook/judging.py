"""Plot a judge's verdicts: both orders, and certainty against accuracy."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rlfuse.algorithms.preferences import calibrate
from rlfuse.observe.reward_model_summary import draw_reliability


def verdicts_by_order(scored: pd.DataFrame, name: str = "judge") -> pd.DataFrame:
    """The probability that the response is the better one: shown first, shown second, and the mean, its reward."""
    mean, position = scored[f"rewards/{name}"].astype(float), scored[f"rewards/{name}/position"].astype(float)
    return pd.DataFrame({"shown first": mean + position - 0.5, "shown second": mean - position + 0.5, "mean": mean})


def plot_orders(scored: pd.DataFrame, right: pd.Series, name: str = "judge") -> Axes:
    """Each response by its two orders; `right`: above 0 where the response is truly the better one."""
    found = verdicts_by_order(scored, name)
    _, axes = plt.subplots(figsize=(4.5, 4.0), layout="constrained")
    for truth, colour, label in ((True, "#3f7fb5", "the response is right"), (False, "#c2385a", "the reference is")):
        chosen = found[(right > 0) == truth]
        axes.scatter(chosen["shown first"], chosen["shown second"], s=12, alpha=0.5, color=colour, label=label)
    axes.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="places count for nothing")
    axes.plot([0, 1], [1, 0], color="grey", linewidth=1, label="the mean is 0.5")
    axes.set(xlabel="P(response), shown first", ylabel="P(response), shown second", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=7)
    return axes


def plot_confidence(probabilities: pd.Series, right: pd.Series) -> Axes:
    """How often a judge is right, by how sure it is; both as of the response."""
    p = probabilities.to_numpy(float).clip(1e-6, 1 - 1e-6)
    gaps = np.log(p / (1 - p)) * np.where(right > 0, 1, -1)  # towards what is truly better
    _, axes = plt.subplots(figsize=(4.5, 3.4), layout="constrained")
    draw_reliability(axes, calibrate(gaps))
    return axes
