"""Read a run folder as pandas tables: samples, metrics, and the time of slots."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from rlfuse.run_folder.reader import RunError, open_run
from rlfuse.samples import prompt_id

PART = "rewards/"


def samples(run: str | Path) -> pd.DataFrame:
    """Return the logged samples of a run (trainer.log_samples per step), one per row. RunError if there are none."""
    folder = open_run(Path(run))
    rows = list(folder.samples())
    if not rows:
        raise RunError(f"{folder.path}: samples.jsonl is empty; run with trainer.log_samples above 0")
    return sample_table(rows)


def sample_table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return rows of `samples.jsonl` as the table of `samples`."""
    rows = list(rows)
    parts = sorted({name for row in rows for name in row["parts"]})
    first = ("data_source", "prompt", "response", "finish", "prompt_tokens", "response_tokens", "reward")
    return pd.DataFrame(
        [
            {"step": row["step"], "id": row["id"], "group": prompt_id(row["id"])}
            | {name: row[name] for name in first}
            | {f"{PART}{name}": row["parts"].get(name) for name in parts}
            | {name: row.get(name) for name in ("note", "ground_truth", "columns")}
            for row in rows
        ]
    ).astype({"reward": float})


def metrics(run: str | Path) -> pd.DataFrame:
    """Return all scalars: a row per step (0 is the validation before step 1), a column per name."""
    rows = open_run(Path(run)).rows()
    if not rows:
        raise RunError(f"{run}: metrics.jsonl is empty; try again after the first step")
    return pd.DataFrame(rows).set_index("step")


def time_spent(run: str | Path) -> pd.DataFrame:
    """Return seconds per slot in each step, as means over slots: `busy/{work}` and `idle/{cause}`, largest first."""
    table = metrics(run)
    names = [name for name in table if name.startswith(("busy/", "idle/"))]
    spent = table.loc[table.index > 0, names].fillna(0.0)
    return spent[spent.sum().sort_values(ascending=False).index]


def surprise(table: pd.DataFrame) -> pd.Series:
    """Return the distance of each reward from the mean of the rest of its group; NaN if there is no other."""
    groups = table.groupby("group")["reward"]
    count = groups.transform("count")
    others = (groups.transform("sum") - table["reward"]) / (count - 1).where(count > 1)
    return (table["reward"] - others).abs()
