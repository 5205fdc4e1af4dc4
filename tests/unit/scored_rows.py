"""Score plain rows like a notebook, without pandas."""

from rlfuse.rewards.api.items import item_of_row
from rlfuse.tools.evaluation.reward_table import as_columns, score_items


def score_table(functions, rows, weights=(), model_path=None):
    """Return the rows with `reward`, parts `{fn}` and `{fn}/{extra}`, `gate`, `note`, `failure` and `traceback`.

    A row has `prompt` (string or messages) and `response`, and columns that the functions need. `reward` is None if
    `failure` is set.
    """
    items = [item_of_row(row, number) for number, row in enumerate(rows)]
    rewards = score_items(functions, items, weights, model_path)
    return [{**row, **as_columns(reward, "")} for row, reward in zip(rows, rewards, strict=True)]
