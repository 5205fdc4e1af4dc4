"""Reward functions on a plain table of samples, with no cluster: how one is written and tried in a notebook.

Role: called by notebooks and tests, in their process and without a time limit. It uses the same loading, calling and
composing as a run, so what it shows is what a run would train on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlfuse.rewards.compose import check_weights, compose
from rlfuse.rewards.functions import Spec, check_functions
from rlfuse.rewards.items import item_of_row
from rlfuse.samples import RewardFailure


def score_table(
    functions: Spec | Sequence[Spec], rows: Sequence[dict[str, Any]], weights: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """The rows with `reward`, its parts as `{fn}` and `{fn}/{extra}`, `note`, `failure` and `traceback` added.

    A row has `prompt` (string or messages) and `response`, and whatever else the functions ask for. `reward` is None
    where `failure` is not.
    """
    loaded = check_functions(functions if isinstance(functions, list | tuple) else [functions])
    names = [function.name for function in loaded]
    weights = check_weights(weights, names)
    items = [item_of_row(row, number) for number, row in enumerate(rows)]
    columns = [function.score(items) for function in loaded]
    return [
        {**row, **_cells(compose(names, weights, outcomes))}
        for row, outcomes in zip(rows, zip(*columns, strict=True), strict=True)
    ]


def _cells(reward: Any) -> dict[str, Any]:
    if isinstance(reward, RewardFailure):
        failure = f"{reward.function}: {reward.message}"
        return {"reward": None, "failure": failure, "note": None, "traceback": reward.traceback}
    return {"reward": reward.value, **reward.parts, "failure": None, "note": reward.text, "traceback": ""}
