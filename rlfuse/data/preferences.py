"""Load preference pairs in TRL's shapes: `chosen` and `rejected`, with or without `prompt`; `margin` and `dimension`.

A malformed row is a `DataError` with file, row and field. Sequences are never truncated.
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
from rlfuse.data.messages import conversation, decode_messages, parse_messages, parse_tools
from rlfuse.data.rows import read_raw_rows
from rlfuse.data.templates import chat_template_errors
from rlfuse.data.tokenizers import conversation_ids, without_padding
from rlfuse.errors import DataError


@dataclass(frozen=True, slots=True)
class Preference:
    """Tokenised preference pair."""

    index: int
    shared_ids: np.ndarray
    """int32: common prefix of both sequences, at least the prompt."""
    chosen_ids: np.ndarray
    """int32 [1 or more]: rest of the preferred sequence."""
    rejected_ids: np.ndarray
    """int32 [1 or more]: rest of the other sequence."""
    margin: float = 0.0
    dimension: str | None = None


def load_preferences(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig, labels: Sequence[str] = ()
) -> tuple[list[Preference], str]:
    """Return all pairs and a summary line. `labels`: allowed dimensions, if known."""
    longest, pairs, dropped = data.max_prompt_length + data.max_response_length, [], 0
    for file in files:
        for where, row in read_raw_rows(file):
            chosen, rejected = (
                _tokenise(f"{file}, {where}", row, side, data.prompt_key, tokenizer) for side in ("chosen", "rejected")
            )
            if (size := max(len(chosen), len(rejected))) > longest:
                if not data.filter_overlong_prompts:
                    raise DataError(
                        f"{file}, {where}: a sequence has {size} tokens, but data.max_prompt_length + "
                        f"data.max_response_length is {longest}. Raise one, or drop such rows with "
                        "data.filter_overlong_prompts=true."
                    )
                dropped += 1
                continue
            if chosen == rejected:
                raise DataError(f"{file}, {where}: chosen and rejected are equal. Remove the row.")
            margin, dimension = _margin(f"{file}, {where}", row), _dimension(f"{file}, {where}", row, labels)
            if pairs and (dimension is None) != (pairs[0].dimension is None):
                raise DataError(f"{file}, {where}, field dimension: {dimension}, but the first row has "
                                f"{pairs[0].dimension}. Set it in all rows, or in none.")  # fmt: skip
            pairs.append(make_preference(len(pairs), chosen, rejected, margin, dimension))
    if not pairs:
        raise DataError(f"{', '.join(files)}: no pairs are left; all {dropped} are longer than {longest} tokens.")
    note = f", {dropped} dropped (over {longest} tokens)" if dropped else ""
    return pairs, f"data  {len(pairs)} pairs from {', '.join(files)}{note}"


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
