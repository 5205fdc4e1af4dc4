"""Read preference pairs, score them with any reward, and plot its errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rlfuse.algorithms.preferences import calibrate
from rlfuse.config.rewards import MODEL_PART, Given
from rlfuse.data.messages import parse_messages
from rlfuse.data.rows import read_raw_rows
from rlfuse.errors import DataError
from rlfuse.observe.calibration_plot import draw_reliability
from rlfuse.rewards.api.shapes import RewardFunction
from rlfuse.tools.notebook.plots import BUSY, new_axes
from rlfuse.tools.notebook.scoring import require_columns, score

SIDES = ("chosen", "rejected")
LENGTH_BINS = 7


def pairs(file: str, prompt_key: str = "prompt") -> pd.DataFrame:
    """Return preference pairs, one per row, with the other columns of the file.

    Raises DataError for pairs of texts that include the prompt.
    """
    rows = []
    for where, row in read_raw_rows(file):
        answers = {side: parse_messages(f"{file}, {where}, field {side}", row.get(side), "assistant") for side in SIDES}
        prompt = row.get(prompt_key)
        if prompt is None and any(len(messages) == 1 for messages in answers.values()):
            raise DataError(
                f"{file}, {where}, field {prompt_key}: it is missing, so prompts and answers can't be separated."
            )
        given = answers["chosen"][:-1] if prompt is None else parse_messages(f"{file}, {where}", prompt, "user")
        texts = {side: messages[-1]["content"] for side, messages in answers.items()}
        shown = "\n".join(message["content"] for message in given)
        rest = {name: value for name, value in row.items() if name not in (prompt_key, *SIDES)}
        rows.append({"prompt": shown, **texts, **rest, "messages": list(given)})
    return pd.DataFrame(rows)


def score_pairs(
    table: pd.DataFrame,
    functions: Given | RewardFunction | Sequence[Given | RewardFunction] = (),
    weights: Sequence[float] = (),
    model_path: str | None = None,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Return the columns `chosen_reward`, `rejected_reward`, `gap` and `failure`, with the index of the table."""
    require_columns(table, "messages", *SIDES)
    inputs = table.drop(columns=[*SIDES, "messages"]).assign(prompt=table["messages"])
    if not functions and "dimension" in table and (labels := list(table["dimension"].dropna().unique())):
        functions = [{"path": f"{MODEL_PART}:{label}", "sources": [label]} for label in labels]
        inputs["data_source"] = table["dimension"]
    scored = [
        score(inputs.assign(response=table[side]), functions, weights, model_path, trust_remote_code=trust_remote_code)
        for side in SIDES
    ]
    found = pd.DataFrame({f"{side}_reward": each["reward"] for side, each in zip(SIDES, scored, strict=True)})
    found["gap"] = found["chosen_reward"] - found["rejected_reward"]
    found["failure"] = scored[0]["failure"].fillna(scored[1]["failure"])
    return found


def plot_calibration(gaps: Sequence[float] | pd.Series) -> Axes:
    """Plot accuracy against confidence for scores that are log-odds; the dotted line is perfect calibration."""
    axes = new_axes(width=4.5, height=3.6)
    draw_reliability(axes, calibrate(pd.Series(gaps, dtype=float).dropna().to_numpy()))
    return axes


def plot_length_bias(table: pd.DataFrame, bins: int = LENGTH_BINS) -> Axes:
    """Plot how often the labels and the reward prefer the longer answer, by length difference."""
    require_columns(table, "gap", *SIDES)
    table = table.dropna(subset="gap")
    difference = table["chosen"].str.len() - table["rejected"].str.len()
    unequal = difference != 0
    longer, gap = difference[unequal], table["gap"][unequal]
    parts = pd.qcut(longer.abs(), min(bins, longer.abs().nunique()), duplicates="drop")
    preferred = pd.DataFrame(
        {"pairs": longer > 0, "reward": np.where(gap == 0, 0.5, (gap > 0) == (longer > 0)), "at": longer.abs()}
    ).astype(float)
    means = preferred.groupby(parts, observed=True).mean()
    axes = new_axes()
    axes.plot(means["at"], means["pairs"], color="black", marker="o", label="labels")
    axes.plot(means["at"], means["reward"], color=BUSY, marker="o", label="reward")
    axes.axhline(0.5, color="black", linestyle=":")
    axes.set(xlabel="length difference in characters", ylabel="longer answer preferred", ylim=(0, 1.02))
    axes.legend()
    return axes
