"""Convert the return value of a reward function to scores, and its exception to a failure.

NaN, infinity, a wrong length and non-numbers raise `InvalidResult`. Parsing may run custom code (`__repr__`,
`__len__`), whose exceptions propagate; `failure` never raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlfuse.config.custom_errors import TRACEBACK_LENGTH, headline, text, user_frames, user_traceback
from rlfuse.config.secrets import hidden_text
from rlfuse.rewards.api.items import Outcome, Score
from rlfuse.samples import Reward, RewardFailure

NOTE_LENGTH = 200
LINE_LENGTH = 2000
TOKENS, STEPS = "token_rewards", "step_rewards"
"""Keys of rewards for single tokens."""
PRED = "pred"
"""Key under which verl's functions return the answer that a majority vote counts."""
Values = list[tuple[Any, dict[str, Any]]]
"""Per sample: the value returned as its reward, and further values to log."""


class InvalidResult(ValueError):
    """A reward function returned a value that is not a reward. The message names the valid ones."""


def failure(name: str, error: BaseException, defined_at: str = "") -> RewardFailure:
    """Return the failure of a call that raised `error`. `defined_at`: file and line of the function."""
    is_invalid = isinstance(error, InvalidResult)
    message = text(str(error)) if is_invalid else headline(error)
    where = defined_at if is_invalid and user_frames(error) is None else user_traceback(error, defined_at)
    return RewardFailure(name, hidden_text(message)[:LINE_LENGTH], hidden_text(where))


def number(value: Any, what: str = "a reward") -> float:
    """Return `value` as a finite float. Raises InvalidResult, whose message calls the value `what`."""
    found = value
    if hasattr(value, "item"):
        try:
            found = value.item()
        except (ValueError, RuntimeError):
            raise InvalidResult(f"returned an array of shape {tuple(value.shape)}; {what} must be one number") from None
    if not isinstance(found, bool | int | float):
        raise InvalidResult(f"returned {_short(value)} ({type(value).__name__}); {what} must be a number")
    try:
        found = float(found)
    except OverflowError:
        digits = int(int.bit_length(found) * math.log10(2)) + 1
        raise InvalidResult(f"returned an integer of {digits} digits, above 1.8e308; {what} must fit a float") from None
    if not math.isfinite(found):
        raise InvalidResult(f"returned {found}; {what} must be finite")
    return found


def require_list(name: str, value: Any, length: int) -> list[Any]:
    """Return `value` as a list of `length` entries, one per sample. Raises InvalidResult otherwise."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise InvalidResult(
            f"returned {_short(value)} ({type(value).__name__}) as {name}; it must be a list of numbers"
        )
    if len(values) != length:
        raise InvalidResult(f"returned {len(values)} {name} for {length} samples; it must return one per sample")
    return list(values)


def split_results(shape: str, result: Any, logs: list[dict[str, Any]]) -> Values:
    """Split the result of a batched function by sample. `logs`: values that it logged per sample (TRL)."""
    if shape == "openrlhf":
        return _split_dict(result, logs)
    name = "scores" if shape == "verl batch" else "rewards"
    return list(zip(require_list(name, result, len(logs)), logs, strict=True))


def _split_dict(result: Any, logs: list[dict[str, Any]]) -> Values:
    if not isinstance(result, dict) or "rewards" not in result:
        keys = f"a dict with the keys {list(result)}" if isinstance(result, dict) else _short(result)
        raise InvalidResult(f"returned {keys}; it must be a dict with the key `rewards`")
    values = require_list("rewards", result["rewards"], len(logs))
    given = {key: value for key, value in result.items() if key not in ("rewards", "extra_logs")}
    for key, value in {**given, **(result.get("extra_logs") or {})}.items():
        log_values(logs, key, value)
    return list(zip(values, logs, strict=True))


def log_values(logs: list[dict[str, Any]], key: str, value: Any) -> None:
    """Add `value` to the log of each sample: one entry per sample if the length matches, else the whole value."""
    values = value.tolist() if hasattr(value, "tolist") else value
    each = values if isinstance(values, list | tuple) and len(values) == len(logs) else [values] * len(logs)
    for log, entry in zip(logs, each, strict=True):
        log[key] = entry


def read_outcome(shape: str, value: Any, log: dict[str, Any], tokens: int | None = None) -> Outcome:
    """Return the outcome of one sample's result: a number, a dict (verl), None (TRL) or a `Reward`.

    `tokens`: number of response tokens; None if unknown.
    """
    if isinstance(value, RewardFailure):
        message = hidden_text(text(str(value.message)))[:LINE_LENGTH] or "(no message)"
        return RewardFailure("", message, hidden_text(text(str(value.traceback or "")))[:TRACEBACK_LENGTH])
    if shape != "openrlhf" and isinstance(value, dict):
        of_tokens = _token_rewards(value, tokens)
        if "score" not in value and of_tokens is None:
            required = f"the key `score` is required, or else `{TOKENS}` or `{STEPS}`"
            raise InvalidResult(f"returned a dict with the keys {list(value)}; {required}")
        total = math.fsum([number(value.get("score", 0.0)), *(of_tokens or ())])
        extras = {key: each for key, each in value.items() if key not in ("score", TOKENS, STEPS)}
        return Score(number(total), *_extras(log | extras), of_tokens)
    if shape == "samples" and isinstance(value, Reward):
        of_tokens = _token_rewards({} if value.token_rewards is None else {TOKENS: value.token_rewards}, tokens)
        extras = value.parts | ({"text": value.text} if value.text else {}) | ({PRED: value.pred} if value.pred else {})
        return Score(number(value.value), *_extras(extras), of_tokens)
    none = value is None and shape in ("trl", "samples")
    return Score(None if none else number(value), *_extras(log))


def _token_rewards(given: Mapping[str, Any], tokens: int | None) -> tuple[float, ...] | None:
    """Return the rewards of single tokens in a result; None if it has none.

    `token_rewards`: one number per response token; `step_rewards`: (index of the step's last token, number) pairs.
    """
    if TOKENS in given and STEPS in given:
        raise InvalidResult(f"returned both {TOKENS} and {STEPS}; return one of them")
    if TOKENS in given:
        values = [number(each, "a token reward") for each in _list(TOKENS, given[TOKENS])]
        if tokens not in (None, len(values)):
            raise InvalidResult(
                f"returned {len(values)} {TOKENS} for a response of {tokens} tokens; it must return one per token, "
                "including the end-of-sequence token"
            )
        return tuple(values)
    return _placed(_list(STEPS, given[STEPS]), tokens) if STEPS in given else None


def _placed(steps: Sequence[Any], tokens: int | None) -> tuple[float, ...]:
    """Return the rewards of steps as one number per response token, 0 except for the last token of each step."""
    found: dict[int, float] = {}
    count = "an unknown number" if tokens is None else tokens
    for step in steps:
        pair = _list(f"an entry of {STEPS}", step)
        if len(pair) != 2:
            raise InvalidResult(f"returned {_short(step)} in {STEPS}; an entry must be (token index, number)")
        end, value = int(position := number(pair[0], "a token index")), number(pair[1], "a step reward")
        if end != position or not 0 <= end < (math.inf if tokens is None else tokens) or end in found:
            raise InvalidResult(
                f"returned a step that ends at token {position:.15g} of {count}; indices must be "
                "whole numbers from 0, below the number of response tokens, without duplicates"
            )
        found[end] = value
    length = max(found, default=-1) + 1 if tokens is None else tokens
    return tuple(found.get(index, 0.0) for index in range(length))


def _list(name: str, value: Any) -> list[Any]:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise InvalidResult(f"returned {_short(value)} ({type(value).__name__}) as {name}; it must be a list")
    return list(values)


def _extras(given: dict[str, Any]) -> tuple[dict[str, float], dict[str, str], str | None]:
    """Return numbers, notes, and the answer `pred` of a majority vote (verl)."""
    numbers, notes, pred = {}, {}, None
    for key, value in given.items():
        name = text(str(key))
        if name == PRED:
            pred = None if value is None else text(str(value))
            continue
        try:
            numbers[name] = number(value)
        except InvalidResult:
            notes[name] = _short(value)
    return numbers, notes, pred


def _short(value: Any) -> str:
    shown = text(value if isinstance(value, str) else repr(value))
    return shown if len(shown) <= NOTE_LENGTH else shown[:NOTE_LENGTH] + "..."
