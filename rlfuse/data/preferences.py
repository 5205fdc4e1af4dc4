"""Load preference pairs in TRL's shapes: `chosen` and `rejected`, with or without `prompt`.

Pairs of reward models are tokenised as reward models score them, and may have a `margin` and a `dimension`; those of
policies as a policy generates. A malformed row is a `DataError` with file, row and field. Nothing is truncated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.config.reward_labels import ONLY_LABEL
from rlfuse.config.schema import DataConfig
from rlfuse.data.conversations import ConversationTokenizer
from rlfuse.data.messages import conversation, decode_messages, parse_messages, parse_tools
from rlfuse.data.rows import read_raw_rows
from rlfuse.data.sequence_limit import SequenceLimit
from rlfuse.data.templates import chat_template_errors
from rlfuse.data.tokenizers import conversation_ids, without_padding
from rlfuse.errors import DataError
from rlfuse.samples import Row


@dataclass(frozen=True, slots=True)
class Preference:
    """Tokenised preference pair."""

    index: int
    shared_ids: np.ndarray
    """int32: common prefix of both sequences, at least the prompt; for policies, the prompt."""
    chosen_ids: np.ndarray
    """int32 [1 or more]: rest of the preferred sequence."""
    rejected_ids: np.ndarray
    """int32 [1 or more]: rest of the other sequence."""
    margin: float = 0.0
    dimension: str | None = None

    @property
    def rows(self) -> list[Row]:
        """The chosen and the rejected sequence; without a common prefix, the first token is the prompt."""
        alone = int(not len(self.shared_ids))  # nothing predicts the first token of a row
        sides = (("chosen", self.chosen_ids), ("rejected", self.rejected_ids))
        return [
            Row(ids[:1] if alone else self.shared_ids, ids[alone:], id=f"{self.index}/{side}") for side, ids in sides
        ]


def load_preferences(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig, labels: Sequence[str] = ()
) -> tuple[list[Preference], str]:
    """Return all pairs of a reward model and a summary line. `labels`: allowed dimensions, if known."""
    limit, pairs = SequenceLimit(data), list[Preference]()
    for file in files:
        for where, row in read_raw_rows(file):
            chosen, rejected = (
                _tokenise(f"{file}, {where}", row, side, data.prompt_key, tokenizer) for side in ("chosen", "rejected")
            )
            if not limit.keeps(f"{file}, {where}", max(len(chosen), len(rejected))):
                continue
            if chosen == rejected:
                raise DataError(f"{file}, {where}: chosen and rejected are equal. Remove the row.")
            margin, dimension = _margin(f"{file}, {where}", row), _dimension(f"{file}, {where}", row, labels)
            if pairs and (dimension is None) != (pairs[0].dimension is None):
                raise DataError(f"{file}, {where}, field dimension: {dimension}, but the first row has "
                                f"{pairs[0].dimension}. Set it in all rows, or in none.")  # fmt: skip
            pairs.append(make_preference(len(pairs), chosen, rejected, margin, dimension))
    return pairs, limit.report(files, len(pairs), "pairs")


def load_policy_preferences(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> tuple[list[Preference], str]:
    """Return all pairs, tokenised for a policy, and a summary line: `shared_ids` is exactly the prompt.

    Rows have a prompt with two completions, or two conversations, whose common first messages are the prompt.
    """
    reader, limit, pairs = ConversationTokenizer(tokenizer, data), SequenceLimit(data), list[Preference]()
    for file in files:
        for where, row in read_raw_rows(file):
            place = f"{file}, {where}"
            whole = _with_prompt(place, row, data.prompt_key)
            chosen, rejected = (reader.read(place, whole, side) for side in ("chosen", "rejected"))
            if not limit.keeps(place, max(len(chosen.ids), len(rejected.ids))):
                continue
            start = chosen.prompt
            if np.array_equal(chosen.ids, rejected.ids):
                raise DataError(f"{place}: chosen and rejected are equal. Remove the row.")
            pairs.append(Preference(len(pairs), chosen.ids[:start], chosen.ids[start:], rejected.ids[start:]))
    return pairs, limit.report(files, len(pairs), "pairs")


def _with_prompt(where: str, row: dict[str, Any], prompt_key: str) -> dict[str, Any]:
    """Return the row with a prompt; without one, the common first messages of its conversations are the prompt."""
    if row.get(prompt_key) is not None:
        return row
    given = {side: decode_messages(f"{where}, field {side}", row.get(side)) for side in ("chosen", "rejected")}
    for side, messages in given.items():
        if isinstance(messages, str):
            raise DataError(
                f"{where}, field {prompt_key}: missing; {side} is a text, whose prompt is not known. Add the prompt."
            )
    chosen, rejected = (parse_messages(f"{where}, field {side}", given[side], "assistant") for side in given)
    most, common = min(len(chosen), len(rejected)) - 1, 0
    while common < most and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise DataError(f"{where}: chosen and rejected have no first message in common. Add a column {prompt_key}.")
    return row | {prompt_key: list(chosen[:common]), "chosen": list(chosen), "rejected": list(rejected)}


def dimension_labels(pairs: Sequence[Preference]) -> list[str]:
    """Return the label names of a new reward head: the pairs' dimensions, in order of appearance."""
    return list(dict.fromkeys(pair.dimension for pair in pairs if pair.dimension)) or [ONLY_LABEL]


def make_preference(
    index: int, chosen: Sequence[int], rejected: Sequence[int], margin: float = 0.0, dimension: str | None = None
) -> Preference:
    """Build a pair with the common prefix stored once; at least one token of each sequence stays in the rest."""
    common, most = 0, min(len(chosen), len(rejected)) - 1
    while common < most and chosen[common] == rejected[common]:
        common += 1
    shared, *rests = (np.asarray(ids, dtype=np.int32) for ids in (chosen[:common], chosen[common:], rejected[common:]))
    return Preference(index, shared, *rests, margin, dimension)


def _tokenise(
    where: str, row: dict[str, Any], side: str, prompt_key: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    given, prompt = decode_messages(f"{where}, field {side}", row.get(side)), row.get(prompt_key)
    answer = parse_messages(f"{where}, field {side}", given, "assistant")
    tools = parse_tools(f"{where}, field tools", row.get("tools"))
    if prompt is None and isinstance(given, str):  # a complete text, already templated
        ids = without_padding(tokenizer(given).input_ids, tokenizer.pad_token_id)
    else:
        before = () if prompt is None else parse_messages(f"{where}, field {prompt_key}", prompt, "user")
        answer = answer[len(before) :] if answer[: len(before)] == before else answer
        first, *more = answer or [{}]
        whole = conversation(before, first["content"]) if first.get("role") == "assistant" else [*before, *answer[:1]]
        with chat_template_errors(f"{where}, field {side}"):
            ids = conversation_ids(tokenizer, [*whole, *more], tools)
    if not ids:
        raise DataError(f"{where}, field {side}: {given!r:.60} has no tokens. Remove the row.")
    return ids


def _margin(where: str, row: dict[str, Any]) -> float:
    given = row.get("margin")
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise DataError(f"{where}, field margin: {given!r:.60}; expected a finite number or null.")
    return float(given)


def _dimension(where: str, row: dict[str, Any], labels: Sequence[str]) -> str | None:
    given = row.get("dimension")
    if given is not None and (not isinstance(given, str) or not given):
        raise DataError(f"{where}, field dimension: {given!r:.60}; expected a non-empty string or null.")
    if labels and given not in (*labels, *([None] if len(labels) == 1 else [])):
        raise DataError(f"{where}, field dimension: {given!r:.60}, but the model's labels are {', '.join(labels)}.")
    return given
