"""Data that reward functions receive and return: a finished response with its row, and its outcome.

Plain data without Ray, vLLM or torch. An outcome is a `Score` or a `RewardFailure`; a failure is never a number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlfuse.errors import RewardError
from rlfuse.samples import RewardFailure, Sample, Visual

NO_POSITIONS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class UnknownTokens(Sequence[int]):
    """Placeholder for tokens that were not saved. Access raises ValueError, so no length is mistaken for 0."""

    count: int | None = None

    def __len__(self) -> int:
        if self.count is None:
            raise self._error()
        return self.count

    def __getitem__(self, place: Any) -> Any:
        raise self._error()

    def _error(self) -> ValueError:
        known = "" if self.count is None else " and its length, len(response_ids)"
        return ValueError(
            f"response_ids: the tokens of this response were not saved, only its text{known}. Tokenize the text, or "
            "add a column response_ids"
        )


@dataclass(frozen=True, slots=True)
class Item:
    """One response to be scored."""

    id: str
    step: int
    prompt: str | list[dict[str, Any]]
    """The prompt column of the row: a string or chat messages."""
    messages: list[dict[str, Any]]
    prompt_text: str
    response: str
    response_ids: list[int] | UnknownTokens
    data_source: str
    ground_truth: Any
    columns: dict[str, Any] = field(default_factory=dict)
    visual: tuple[Visual, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens in the response; 0 if unknown."""
        unknown = isinstance(self.response_ids, UnknownTokens) and self.response_ids.count is None
        return 0 if unknown else len(self.response_ids)

    @property
    def known_tokens(self) -> int | None:
        """Number of tokens in the response; None if unknown."""
        return self.response_ids.count if isinstance(self.response_ids, UnknownTokens) else len(self.response_ids)

    @property
    def lacks_visual(self) -> bool:
        """True if the row has clips or images that are not available here; saved samples never include them."""
        return not self.visual and any(self.columns.get(name) for name in ("images", "videos"))

    def column(self, name: str) -> Any:
        if name in self.columns:
            return self.columns[name]
        if name in ("data_source", "ground_truth"):
            return getattr(self, name)
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one function for one item."""

    value: float | None
    """None if the function does not apply to this item."""
    extras: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    pred: str | None = None
    """The answer of the response."""
    token_rewards: tuple[float, ...] | None = None
    """Parts of `value` that belong to single tokens, one for each response token."""


Outcome = Score | RewardFailure


def private_copy(item: Item, columns: Iterable[str]) -> Item:
    """Return a deep copy of the item with only these columns. Raises RewardError for a value that cannot be copied."""
    memo: dict[int, Any] = {}

    def copied(name: str, value: Any) -> Any:
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise RewardError(f"{name} can't be copied for a reward function ({why}); use plain data") from error

    return replace(
        item,
        prompt=copied("prompt", item.prompt),
        messages=copied("messages", item.messages),
        ground_truth=copied("ground_truth", item.ground_truth),
        columns={name: copied(f"column {name!r}", item.columns[name]) for name in columns if name in item.columns},
        response_ids=list(item.response_ids) if isinstance(item.response_ids, list) else item.response_ids,
    )


def item_of_sample(sample: Sample, prompt_key: str = "prompt") -> Item:
    """Return the item of a finished sample. `prompt_key`: column with the prompt, a string or chat messages."""
    prompt, response = sample.prompt, sample.response
    if response is None:
        raise ValueError(
            f"sample {sample.id} has no response; only finished samples can be scored. Generate the response first"
        )
    messages = [dict(message) for message in prompt.messages]
    given = prompt.columns.get(prompt_key)
    return Item(
        id=sample.id,
        step=sample.step,
        prompt=given if isinstance(given, str) else messages,
        messages=messages,
        prompt_text=prompt.text,
        response=response.text,
        response_ids=response.token_ids.tolist() or (UnknownTokens() if response.text else []),
        data_source=prompt.data_source,
        ground_truth=prompt.ground_truth,
        columns={name: value for name, value in prompt.columns.items() if name != prompt_key},
        visual=tuple(replace(each, positions=NO_POSITIONS) for each in prompt.visual),
    )


def tokens_of(row: dict[str, Any]) -> list[int] | UnknownTokens:
    """Return the response tokens of a row, or a placeholder with their count (column `response_tokens` of a run)."""
    given, count = row.get("response_ids"), row.get("response_tokens")
    if given is not None and (len(given) or not row["response"]):
        return [int(token) for token in given]
    return UnknownTokens(None if count is None else int(count))


def item_of_row(row: dict[str, Any], number: int = 0) -> Item:
    """Return the item of a plain row with `prompt`, `response` and any columns of a verl or TRL row."""
    for name, kinds in (("prompt", str | Sequence), ("response", str)):
        if not isinstance(row.get(name), kinds):
            valid = "a string" if kinds is str else "a string or a list of chat messages"
            raise ValueError(
                f"row {number}: {name} is {row.get(name)!r}; it must be {valid}. Columns of the row: {list(row)}"
            )
    prompt = row["prompt"] if isinstance(row["prompt"], str) else [dict(message) for message in row["prompt"]]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    style = row.get("reward_model")
    truth = row.get("ground_truth", style.get("ground_truth") if isinstance(style, dict) else None)
    return Item(
        id=str(number),
        step=-1,
        prompt=prompt,
        messages=messages,
        prompt_text="\n".join(str(message["content"]) for message in messages),
        response=row["response"],
        response_ids=tokens_of(row),
        data_source=row.get("data_source", ""),
        ground_truth=truth,
        columns={name: value for name, value in row.items() if name not in ("prompt", "response", "response_ids")},
    )
