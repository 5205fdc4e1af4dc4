"""A table of samples, scored with any reward in this process.

Role: `score` is for notebooks; rewards are loaded, called and composed as in a job. An ordinary function has no time
limit here: interrupt the cell where it hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from rlfuse.config.rewards import Given
from rlfuse.observe.dataframes import PART
from rlfuse.observe.tracking import sample_of_row
from rlfuse.rewards.api.items import Item, item_of_row, item_of_sample
from rlfuse.rewards.api.shapes import RewardFunction
from rlfuse.rewards.table import as_columns, score_items


def score(
    table: pd.DataFrame,
    functions: Given | RewardFunction | Sequence[Given | RewardFunction] = (),
    weights: Sequence[float] = (),
    model_path: str | None = None,
    prompt_key: str = "prompt",
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """The table's rows scored: `reward`, `rewards/{part}`, `gate`, `note`, `failure` and `traceback`, by its index.

    `functions`: a function or an object, a path (`my_reward.py:compute_score`), an entry with its weight, sources, ...,
    or a list of those, as in reward.functions; a reward model is given by `model_path`, and `trust_remote_code` runs
    modelling code that ships with it. `table`: as `samples` gives it, or any table with `prompt` (text or
    messages), `response` and whatever else the functions ask for. `reward` is NaN where `failure` says why.
    `prompt_key`: of a run whose data.prompt_key is another.
    """
    need(table, "prompt", "response")
    plain = table.astype(object).where(table.notna(), None)
    items = [_item(row, number, prompt_key) for number, row in enumerate(plain.to_dict("records"))]
    rewards = score_items(functions, items, weights, model_path, trust_remote_code)
    scored = pd.DataFrame([as_columns(reward, PART) for reward in rewards], table.index)
    return scored.astype({"reward": float})


def need(table: pd.DataFrame, *columns: str) -> None:
    """ValueError for what is no table, or has not all of these columns."""
    if not isinstance(table, pd.DataFrame):
        raise ValueError(f"table: got a {type(table).__name__}; give a pandas table, as pandas.DataFrame(rows) makes")
    if missing := [name for name in columns if name not in table]:
        has = ", ".join(map(str, table.columns))
        raise ValueError(f"table: has no column {', '.join(missing)}; its columns are {has}")


def _item(row: dict, number: int, prompt_key: str) -> Item:
    """Of a run's sample what the run saw; of any other row what it says."""
    if isinstance(row.get("columns"), dict) and "id" in row:
        return item_of_sample(sample_of_row(row, prompt_key), prompt_key)
    return item_of_row(row, number)
