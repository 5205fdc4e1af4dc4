"""Compare two rewards of the same samples. Pure.

A pair of responses to one prompt is `flipped` if the rewards disagree on the better one, `untied` if only the second
reward separates them, `tied` if only the first does. A sample is `advantage_flipped` if its reward is above the mean of
its group for one reward and below it for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

ALL = "all"
TEXTS = ("step", "id", "group", "data_source", "prompt", "response", "ground_truth")


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`."""

    agreement: pd.DataFrame
    """One row per data_source and one for all: number of samples, means, Pearson and Spearman correlations (NaN if a
    reward is constant), number of pairs and how many are flipped, untied and tied, number of groups and how many have
    zero std before and after, number of samples with flipped advantage."""
    samples: pd.DataFrame
    """Samples with both rewards: texts, `before`, `after`, `rank_shift` (change of the rank within the data_source, -1
    to 1) and `advantage_flipped`."""
    unscored: int
    """Number of samples without one of the rewards, which are excluded."""

    def disagreements(self, count: int = 10) -> pd.DataFrame:
        """Return the `count` samples with the largest change of rank, largest first."""
        order = self.samples["rank_shift"].abs().sort_values(ascending=False, kind="stable").index
        return self.samples.loc[order[:count]]


def compare(before: pd.DataFrame, after: pd.DataFrame) -> Comparison:
    """Compare two tables of the same rows, by index. Raises ValueError if their rows differ."""
    for name, table in (("before", before), ("after", after)):
        if "reward" not in table:
            raise ValueError(f"{name}: the table has no column `reward`, only {list(table)}. Score it first")
    if not before.index.equals(after.index):
        raise ValueError(
            f"after: its {len(after)} rows differ from the {len(before)} rows of before. Score the same table"
        )
    table = before[[name for name in TEXTS if name in before]].copy()
    table["before"], table["after"] = before["reward"].astype(float), after["reward"].astype(float)
    both = table.dropna(subset=["before", "after"])
    source = both["data_source"] if "data_source" in both else pd.Series(ALL, both.index)
    group = both["group" if "group" in both else "prompt"]
    ranks = both.groupby(source)[["before", "after"]].rank(pct=True)
    over = both[["before", "after"]] - both.groupby(group)[["before", "after"]].transform("mean")
    both = both.assign(
        rank_shift=ranks["after"] - ranks["before"],
        advantage_flipped=np.sign(over["before"].round(12)) * np.sign(over["after"].round(12)) < 0,
    )
    parts = [(str(name), part) for name, part in both.groupby(source)] if source.nunique() > 1 else []
    rows = {name: _agreement(part, group) for name, part in [*parts, (ALL, both)]}
    return Comparison(pd.DataFrame.from_dict(rows, orient="index"), both, len(table) - len(both))


def _agreement(samples: pd.DataFrame, group: pd.Series) -> dict[str, float]:
    before, after = samples["before"], samples["after"]
    found = {
        "samples": len(samples),
        "mean_before": before.mean(),
        "mean_after": after.mean(),
        "pearson": _correlation(before, after),
        "spearman": _correlation(before.rank(), after.rank()),
    }
    pairs = {"pairs": 0, "flipped": 0, "untied": 0, "tied": 0}
    groups = {"groups": 0, "zero_std_before": 0, "zero_std_after": 0}
    for _, responses in samples.groupby(group.loc[samples.index]):
        first, second = (_order(responses[name].to_numpy()) for name in ("before", "after"))
        pairs["pairs"] += len(first)
        pairs["flipped"] += int((first * second < 0).sum())
        pairs["untied"] += int(((first == 0) & (second != 0)).sum())
        pairs["tied"] += int(((first != 0) & (second == 0)).sum())
        groups["groups"] += 1
        groups["zero_std_before"] += int(not first.any())
        groups["zero_std_after"] += int(not second.any())
    return found | pairs | groups | {"advantage_flipped": int(samples["advantage_flipped"].sum())}


def _order(values: np.ndarray) -> np.ndarray:
    return np.sign(np.subtract.outer(values, values))[np.triu_indices(len(values), 1)]


def _correlation(one: pd.Series, other: pd.Series) -> float:
    """Return Pearson's correlation, or NaN if one side is constant."""
    return one.corr(other) if one.nunique() > 1 and other.nunique() > 1 else float("nan")
