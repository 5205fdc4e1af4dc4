"""Convert what a reward function returned to scores, and what it raised to failures.

NaN, infinity, a wrong length and non-numbers are `InvalidResult`. Readers may run custom code (`__repr__`, `__len__`) and
let its errors pass; `failure` never raises.
"""

from __future__ import annotations

import math
from typing import Any

from rlfuse.config.custom_errors import TRACEBACK_LENGTH, headline, text, user_frames, user_traceback
from rlfuse.config.secrets import hidden_text
from rlfuse.rewards.api.items import Outcome, Score
from rlfuse.samples import Reward, RewardFailure

NOTE_LENGTH = 200
LINE_LENGTH = 2000
Values = list[tuple[Any, dict[str, Any]]]
"""For each sample what a function gave as its reward, and what else is to be logged."""


class InvalidResult(ValueError):
    """What a reward function returned is no reward. The message says what is."""


def failure(name: str, error: BaseException, defined_at: str = "") -> RewardFailure:
    """The failure of a call that raised, or gave what can't be read; `defined_at`: where the function does."""
    unreadable = isinstance(error, InvalidResult)
    said = text(str(error)) if unreadable else headline(error)
    where = defined_at if unreadable and user_frames(error) is None else user_traceback(error, defined_at)
    return RewardFailure(name, hidden_text(said)[:LINE_LENGTH], hidden_text(where))


def number(value: Any, what: str = "a reward") -> float:
    """A finite float; `what` it is to be, for whoever reads that it is none."""
    found = value
    if hasattr(value, "item"):
        try:
            found = value.item()
        except (ValueError, RuntimeError):
            raise InvalidResult(f"returned an array of shape {tuple(value.shape)} where one number belongs") from None
    if not isinstance(found, bool | int | float):
        raise InvalidResult(f"returned {_short(value)} ({type(value).__name__}); {what} has to be a number")
    try:
        found = float(found)
    except OverflowError:
        digits = int(int.bit_length(found) * math.log10(2)) + 1
        raise InvalidResult(f"returned an integer of {digits} digits, above 1.8e308; {what} has to be finite") from None
    if not math.isfinite(found):
        raise InvalidResult(f"returned {found}; {what} has to be finite")
    return found


def listed(name: str, value: Any, length: int) -> list[Any]:
    """A list with one entry for each of `length` samples."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise InvalidResult(
            f"returned {_short(value)} ({type(value).__name__}) as {name}; it has to be a list of numbers"
        )
    if len(values) != length:
        raise InvalidResult(f"returned {len(values)} {name} for {length} samples; it has to be one for each sample")
    return list(values)


def split(shape: str, result: Any, logs: list[dict[str, Any]]) -> Values:
    """What a batched function of this shape returned, by samples; `logs`: what it logged for each (TRL)."""
    if shape == "openrlhf":
        return _split_dict(result, logs)
    name = "scores" if shape == "verl batch" else "rewards"
    return list(zip(listed(name, result, len(logs)), logs, strict=True))


def _split_dict(result: Any, logs: list[dict[str, Any]]) -> Values:
    if not isinstance(result, dict) or "rewards" not in result:
        keys = f"a dict with the keys {list(result)}" if isinstance(result, dict) else _short(result)
        raise InvalidResult(f"returned {keys}; it has to be a dict with `rewards`")
    values = listed("rewards", result["rewards"], len(logs))
    given = {key: value for key, value in result.items() if key not in ("rewards", "extra_logs")}
    for key, value in {**given, **(result.get("extra_logs") or {})}.items():
        spread(logs, key, value)
    return list(zip(values, logs, strict=True))


def spread(logs: list[dict[str, Any]], key: str, value: Any) -> None:
    """Write `value` into each sample's log: entry by entry if it has one for each sample, else the same for all."""
    values = value.tolist() if hasattr(value, "tolist") else value
    each = values if isinstance(values, list | tuple) and len(values) == len(logs) else [values] * len(logs)
    for log, entry in zip(logs, each, strict=True):
        log[key] = entry


def read(shape: str, value: Any, log: dict[str, Any]) -> Outcome:
    """Return one sample's result in this shape: a number, a dict (verl), None (TRL), or a `Reward`."""
    if isinstance(value, RewardFailure):
        message = hidden_text(text(str(value.message)))[:LINE_LENGTH] or "(no message)"
        return RewardFailure("", message, hidden_text(text(str(value.traceback or "")))[:TRACEBACK_LENGTH])
    if shape in ("verl", "verl batch") and isinstance(value, dict):
        if "score" not in value:
            raise InvalidResult(f"returned a dict with the keys {list(value)}; it needs `score`")
        return Score(number(value["score"]), *_extras({key: value[key] for key in value if key != "score"}))
    if shape == "samples" and isinstance(value, Reward):
        return Score(number(value.value), *_extras(value.parts | ({"text": value.text} if value.text else {})))
    none = value is None and shape in ("trl", "samples")
    return Score(None if none else number(value), *_extras(log))


def _extras(given: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    numbers, notes = {}, {}
    for key, value in given.items():
        name = text(str(key))
        try:
            numbers[name] = number(value)
        except InvalidResult:
            notes[name] = _short(value)
    return numbers, notes


def _short(value: Any) -> str:
    shown = text(value if isinstance(value, str) else repr(value))
    return shown if len(shown) <= NOTE_LENGTH else shown[:NOTE_LENGTH] + "..."
