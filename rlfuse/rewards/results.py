"""From what a reward function returned to outcomes, and from what it raised to failures.

Role: pure readers of the result shapes, used by `RewardFunction`. No Ray or torch import: tensors and arrays are
read through their `item` and `tolist`.
Invariants: NaN, infinity, a wrong length and anything that is not a number become a `RewardFailure`; the traceback of
a failure begins in the user's code.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlfuse.rewards.items import Outcome, Score
from rlfuse.samples import Reward, RewardFailure

OURS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent), "<frozen importlib")
NOTE_LENGTH = 200


def failure(name: str, error: BaseException) -> RewardFailure:
    """The failure of a call that raised."""
    return RewardFailure(name, headline(error), user_traceback(error))


def headline(error: BaseException) -> str:
    """Type and message of an exception on one line."""
    first = (str(error).strip().splitlines() or ["(no message)"])[0]
    return f"{type(error).__name__}: {first}"


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames that led into the user's code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(OURS):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def number(value: Any) -> float:
    """A finite float; ValueError for anything else."""
    found = value
    if hasattr(value, "item"):
        try:
            found = value.item()
        except (ValueError, RuntimeError):
            raise ValueError(f"returned an array of shape {tuple(value.shape)} where one number belongs") from None
    if not isinstance(found, bool | int | float):
        raise ValueError(f"returned {_short(value)} ({type(value).__name__}); a reward has to be a number")
    if not math.isfinite(found):
        raise ValueError(f"returned {float(found)}; a reward has to be finite")
    return float(found)


def listed(name: str, value: Any, length: int) -> list[Any]:
    """A list with one entry for each of `length` samples; ValueError for anything else."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise ValueError(f"returned {_short(value)} ({type(value).__name__}) as {name}; it has to be a list of numbers")
    if len(values) != length:
        raise ValueError(f"returned {len(values)} {name} for {length} samples; it has to be one for each sample")
    return list(values)


def read_single(name: str, result: Any) -> Outcome:
    """verl: a number, or a dict with `score` and more to log."""
    try:
        if not isinstance(result, dict):
            return Score(number(result))
        if "score" not in result:
            raise ValueError(f"returned a dict with the keys {list(result)}; it needs `score`")
        rest = {key: value for key, value in result.items() if key != "score"}
        return Score(number(result["score"]), *split_extras(rest))
    except ValueError as error:
        return RewardFailure(name, str(error))


def read_list(name: str, result: Any, logs: list[dict[str, Any]]) -> list[Outcome]:
    """TRL: a list of numbers or None; `logs` are what the function logged for each sample."""
    try:
        values = listed("rewards", result, len(logs))
    except ValueError as error:
        return [RewardFailure(name, str(error))] * len(logs)
    return [_entry(name, value, log, nullable=True) for value, log in zip(values, logs, strict=True)]


def read_dict(name: str, result: Any, length: int) -> list[Outcome]:
    """OpenRLHF: a dict with `rewards`; `scores` and `extra_logs` are logged."""
    try:
        if not isinstance(result, dict) or "rewards" not in result:
            keys = f"a dict with the keys {list(result)}" if isinstance(result, dict) else _short(result)
            raise ValueError(f"returned {keys}; it has to be a dict with `rewards`")
        values = listed("rewards", result["rewards"], length)
    except ValueError as error:
        return [RewardFailure(name, str(error))] * length
    given = {key: value for key, value in result.items() if key not in ("rewards", "extra_logs")}
    logs: list[dict[str, Any]] = [{} for _ in range(length)]
    for key, value in {**given, **(result.get("extra_logs") or {})}.items():
        spread(logs, key, value)
    return [_entry(name, value, log, nullable=False) for value, log in zip(values, logs, strict=True)]


def read_singles(name: str, result: Any, length: int) -> list[Outcome]:
    """verl's batch shape: a number or a dict with `score` for each sample."""
    try:
        return [read_single(name, value) for value in listed("scores", result, length)]
    except ValueError as error:
        return [RewardFailure(name, str(error))] * length


def read_samples(name: str, result: Any, length: int) -> list[Outcome]:
    """A `Reward`, a number, None or a `RewardFailure` for each sample."""
    try:
        return [_read_reward(name, value) for value in listed("rewards", result, length)]
    except ValueError as error:
        return [RewardFailure(name, str(error))] * length


def _read_reward(name: str, value: Any) -> Outcome:
    if isinstance(value, RewardFailure):
        return replace(value, function=name)
    if not isinstance(value, Reward):
        return _entry(name, value, {}, nullable=True)
    log = {**value.parts, **({"text": value.text} if value.text else {})}
    return _entry(name, value.value, log, nullable=False)


def spread(logs: list[dict[str, Any]], key: str, value: Any) -> None:
    """Write `value` into each sample's log: entry by entry if it has one for each sample, else the same for all."""
    values = value.tolist() if hasattr(value, "tolist") else value
    each = values if isinstance(values, list | tuple) and len(values) == len(logs) else [values] * len(logs)
    for log, entry in zip(logs, each, strict=True):
        log[key] = entry


def split_extras(extras: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers, which become parts of the reward, and the rest, which become notes."""
    numbers, notes = {}, {}
    for key, value in extras.items():
        try:
            numbers[str(key)] = number(value)
        except ValueError:
            notes[str(key)] = _short(value)
    return numbers, notes


def _entry(name: str, value: Any, log: dict[str, Any], nullable: bool) -> Outcome:
    try:
        return Score(None if value is None and nullable else number(value), *split_extras(log))
    except ValueError as error:
        return RewardFailure(name, str(error))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= NOTE_LENGTH else text[:NOTE_LENGTH] + "..."
