"""From what a reward function returned to scores, and from what it raised to failures.

Role: pure readers of the result shapes, used by `RewardFunction`. No Ray or torch import: tensors and arrays are
read through their `item` and `tolist`.
Invariants:
- NaN, infinity, a wrong length and anything that is not a number are `Unreadable`, never a number;
- reading runs a user's code (`__repr__`, `__len__`, ...), which may raise anything: readers let it pass; `failure`
  makes a `RewardFailure` of it, and never raises itself;
- what comes out is plain floats and text that any file and terminal takes; the traceback of a failure begins in the
  user's code, and where no line of theirs raised, it is the one where the function begins.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import linecache
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlfuse.config import own_modules
from rlfuse.rewards.api.items import Outcome, Score
from rlfuse.samples import Reward, RewardFailure

OURS = (
    str(Path(__file__).parents[1]),
    own_modules.__file__,
    str(Path(asyncio.__file__).parent),
    inspect.__file__,
    "<frozen importlib",
)
NOTE_LENGTH = 200
LINE_LENGTH = 2000
TRACEBACK_LENGTH = 20_000
"""Characters of what an exception says, and of where it was raised."""
MOST_LINKED = 100
"""Exceptions of a chain or group that are shown. While a longer one is handled, each that is raised walks all of it."""

Values = list[tuple[Any, dict[str, Any]]]
"""For each sample what a function gave as its reward, and what else is to be logged."""


class Unreadable(ValueError):
    """What a reward function returned is no reward. The message says what is."""


# What was raised -----------------------------------------------------------------------------------------------------


def failure(name: str, error: BaseException, begins: str = "") -> RewardFailure:
    """The failure of a call that raised, or gave what can't be read; `begins`: where the function does."""
    said = text(str(error)) if isinstance(error, Unreadable) else headline(error)
    return RewardFailure(name, said[:LINE_LENGTH], _safely(user_traceback, error, begins, otherwise=begins))


def headline(error: BaseException) -> str:
    """Type and message of an exception on one line."""
    kind = _safely(lambda: text(type(error).__name__), otherwise="an exception without a name")
    said = _safely(lambda: text(str(error)), otherwise="(its message can't be shown)")
    return f"{kind}: {(said.strip().splitlines() or ['(no message)'])[0]}"


def _safely(look: Callable[..., str], *arguments: Any, otherwise: str) -> str:
    """What is seen of an exception, which may be made so that looking at it raises."""
    try:
        return look(*arguments)
    except BaseException:
        return otherwise


def user_traceback(error: BaseException, begins: str = "") -> str:
    """The traceback without the frames that led into the user's code; `begins` instead of one without theirs."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(OURS):
        frame = frame.tb_next
    if frame is None and isinstance(error, Unreadable):
        return begins
    if _are_many(error):
        led = f"(more than {MOST_LINKED} exceptions led to it or are in it; they are left out)"
        parts = ["Traceback (most recent call last):\n", *traceback.format_tb(frame), f"{headline(error)}\n{led}"]
    else:
        parts = traceback.format_exception(type(error), error, frame)
    shown = text("".join(parts)).rstrip()
    shown = f"{begins}\n{shown}" if frame is None and begins else shown
    half = TRACEBACK_LENGTH // 2
    return shown if len(shown) <= TRACEBACK_LENGTH else f"{shown[:half]}\n...\n{shown[-half:]}"


def _are_many(error: BaseException) -> bool:
    """Whether an exception has more causes, contexts and members of groups than can be shown in time."""
    seen, waiting = set(), [error]
    while waiting and len(seen) <= MOST_LINKED:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += one.__cause__, one.__context__
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return len(seen) > MOST_LINKED


def beginning(call: Any) -> str:
    """Where a function begins, as a traceback shows it; empty for what has no Python code."""
    while isinstance(call, functools.partial):
        call = call.func
    call = inspect.unwrap(call)
    code = getattr(call if inspect.isroutine(call) else type(call).__call__, "__code__", None)
    if code is None:
        return ""
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return text(f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n    {line}')


def text(value: str) -> str:
    """A plain string without lone surrogates, which neither files nor terminals take."""
    return str.encode(value, errors="backslashreplace").decode()


# What was returned ---------------------------------------------------------------------------------------------------


def number(value: Any, what: str = "a reward") -> float:
    """A finite float; `what` it is to be, for whoever reads that it is none."""
    found = value
    if hasattr(value, "item"):
        try:
            found = value.item()
        except (ValueError, RuntimeError):
            raise Unreadable(f"returned an array of shape {tuple(value.shape)} where one number belongs") from None
    if not isinstance(found, bool | int | float):
        raise Unreadable(f"returned {_short(value)} ({type(value).__name__}); {what} has to be a number")
    try:
        found = float(found)
    except OverflowError:
        digits = int(int.bit_length(found) * math.log10(2)) + 1
        raise Unreadable(f"returned an integer of {digits} digits, above 1.8e308; {what} has to be finite") from None
    if not math.isfinite(found):
        raise Unreadable(f"returned {found}; {what} has to be finite")
    return found


def listed(name: str, value: Any, length: int) -> list[Any]:
    """A list with one entry for each of `length` samples."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        raise Unreadable(f"returned {_short(value)} ({type(value).__name__}) as {name}; it has to be a list of numbers")
    if len(values) != length:
        raise Unreadable(f"returned {len(values)} {name} for {length} samples; it has to be one for each sample")
    return list(values)


def split(shape: str, result: Any, logs: list[dict[str, Any]]) -> Values:
    """What a batched function of this shape returned, by samples; `logs`: what it logged for each (TRL)."""
    if shape == "openrlhf":
        return _split_dict(result, logs)
    name = "scores" if shape == "verl batch" else "rewards"
    return list(zip(listed(name, result, len(logs)), logs, strict=True))


def _split_dict(result: Any, logs: list[dict[str, Any]]) -> Values:
    """OpenRLHF: a dict with `rewards`; `scores` and `extra_logs` are logged."""
    if not isinstance(result, dict) or "rewards" not in result:
        keys = f"a dict with the keys {list(result)}" if isinstance(result, dict) else _short(result)
        raise Unreadable(f"returned {keys}; it has to be a dict with `rewards`")
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
    """What a function of this shape says of one sample: a number, or what its shape has besides.

    verl: a dict with `score` and more to log. TRL and samples: None, where it does not apply. samples: a `Reward`.
    """
    if isinstance(value, RewardFailure):
        message = text(str(value.message))[:LINE_LENGTH] or "(no message)"
        return RewardFailure("", message, text(str(value.traceback or ""))[:TRACEBACK_LENGTH])
    if shape in ("verl", "verl batch") and isinstance(value, dict):
        if "score" not in value:
            raise Unreadable(f"returned a dict with the keys {list(value)}; it needs `score`")
        return Score(number(value["score"]), *_extras({key: value[key] for key in value if key != "score"}))
    if shape == "samples" and isinstance(value, Reward):
        return Score(number(value.value), *_extras(value.parts | ({"text": value.text} if value.text else {})))
    none = value is None and shape in ("trl", "samples")
    return Score(None if none else number(value), *_extras(log))


def _extras(given: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers, which become parts of the reward, and the rest, which become notes."""
    numbers, notes = {}, {}
    for key, value in given.items():
        name = text(str(key))
        try:
            numbers[name] = number(value)
        except Unreadable:
            notes[name] = _short(value)
    return numbers, notes


def _short(value: Any) -> str:
    shown = text(value if isinstance(value, str) else repr(value))
    return shown if len(shown) <= NOTE_LENGTH else shown[:NOTE_LENGTH] + "..."
