"""Score a table of samples, and compute metrics of it, in this process without a time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from rlfuse.config.custom_functions import METRICS
from rlfuse.config.custom_modules import load
from rlfuse.config.rewards import Given
from rlfuse.observe.custom_metrics import FinishedSample, finished, metrics_by_name
from rlfuse.observe.tracking import sample_of_row
from rlfuse.rewards.api.items import Item, item_of_row, item_of_sample, tokens_of
from rlfuse.rewards.api.results import number
from rlfuse.rewards.api.shapes import RewardFunction
from rlfuse.samples import Reward
from rlfuse.tools.dataframes import PART
from rlfuse.tools.evaluation.reward_table import as_columns, score_items


def score(
    table: pd.DataFrame,
    functions: Given | RewardFunction | Sequence[Given | RewardFunction] = (),
    weights: Sequence[float] = (),
    model_path: str | None = None,
    prompt_key: str = "prompt",
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Score the rows of a table. Return `reward`, `rewards/{part}`, `gate`, `note`, `failure` and `traceback`.

    `table`: from `samples`, or any table with `prompt` (text or messages), `response` and the columns that the
    functions need. The result has the same index; `reward` is NaN where `failure` has a message.
    `functions`: a function or object, a path (`my_reward.py:compute_score`), an entry with weight and sources, or a
    list of these, as in reward.functions. `model_path`: reward model; `trust_remote_code` runs its modelling code.
    `prompt_key`: value of data.prompt_key in the run.
    A run saves the number of response tokens, not the tokens: a function that reads them fails unless the table has a
    column `response_ids`.
    """
    require_columns(table, "prompt", "response")
    plain = table.astype(object).where(table.notna(), None)
    items = [_item(row, number, prompt_key) for number, row in enumerate(plain.to_dict("records"))]
    rewards = score_items(functions, items, weights, model_path, trust_remote_code)
    scored = pd.DataFrame([as_columns(reward, PART) for reward in rewards], table.index)
    return scored.astype({"reward": float})


def measure(table: pd.DataFrame, metric: str | Callable[..., Any], prompt_key: str = "prompt") -> pd.DataFrame:
    """Return the values of a metric, a function or `path/file.py:name`, with one row per step.

    `table`: from `samples`. `prompt_key`: value of data.prompt_key in the run. A run saves the number of response
    tokens, not the tokens: only `len(response_ids)` works unless the table has them. Exceptions of the metric
    propagate; values that are not finite numbers raise ValueError.
    """
    require_columns(table, "step", "id", "finish", "prompt", "response", "response_tokens", "reward")
    function = load(METRICS, metric) if isinstance(metric, str) else metric
    plain, name = table.astype(object).where(table.notna(), None), getattr(function, "__name__", "metric")
    found = {}
    for step, rows in plain.groupby("step"):
        returned = metrics_by_name(function([_finished(row, prompt_key) for row in rows.to_dict("records")]))
        found[step] = {figure or name: number(each, "a metric") for figure, each in returned.items()}
    return pd.DataFrame.from_dict(found, orient="index").rename_axis("step")


def require_columns(table: pd.DataFrame, *columns: str) -> None:
    """Raise ValueError unless `table` is a pandas table with all of these columns."""
    if not isinstance(table, pd.DataFrame):
        raise ValueError(
            f"table: got a {type(table).__name__}; pass a pandas table, for instance pandas.DataFrame(rows)"
        )
    if missing := [name for name in columns if name not in table]:
        has = ", ".join(map(str, table.columns))
        raise ValueError(f"table has no column {', '.join(missing)}; its columns are {has}")


def _item(row: dict, number: int, prompt_key: str) -> Item:
    if isinstance(row.get("columns"), dict) and "id" in row:
        return replace(item_of_sample(sample_of_row(row, prompt_key), prompt_key), response_ids=tokens_of(row))
    return item_of_row(row, number)


def _finished(row: dict, prompt_key: str) -> FinishedSample:
    sample = sample_of_row(row, prompt_key)
    parts = {name.removeprefix(PART): each for name, each in row.items() if name.startswith(PART) and each is not None}
    sample.reward = None if row["reward"] is None else Reward(row["reward"], parts)
    return replace(finished(sample, prompt_key), response_ids=tokens_of(row))
