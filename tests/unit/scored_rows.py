"""Rewards on plain rows, as a notebook has them, without pandas."""

from rlfuse.rewards.api.items import item_of_row
from rlfuse.tools.evaluation.reward_table import as_columns, score_items


def score_table(functions, rows, weights=(), model_path=None):
    """The rows with `reward`, its parts as `{fn}` and `{fn}/{extra}`, `gate`, `note`, `failure` and `traceback` added.

    A row has `prompt` (string or messages) and `response`, and whatever else the functions ask for. `reward` is None
    where `failure` is not.
    """
    items = [item_of_row(row, number) for number, row in enumerate(rows)]
    rewards = score_items(functions, items, weights, model_path)
    return [{**row, **as_columns(reward, "")} for row, reward in zip(rows, rewards, strict=True)]
