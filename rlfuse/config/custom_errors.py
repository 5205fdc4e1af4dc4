"""Describe exceptions of custom code: one line, and a traceback that begins in that code.

Inspecting an exception may run code of its class; these functions never raise and return printable text.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rlfuse.console import plain

CALLERS = (
    *(str(Path(__file__).parents[1] / room) for room in ("config", "fusion", "observe", "rewards")),
    str(Path(asyncio.__file__).parent),
    inspect.__file__,
    "<frozen importlib",
)
"""Beginnings of the files whose frames only lead into a user's code."""
TRACEBACK_LENGTH = 20_000
MOST_LINKED = 100
"""Exceptions of a chain or group that are shown. While a longer one is handled, each that is raised walks all of it."""


def headline(error: BaseException) -> str:
    """Type and message of an exception on one line."""
    kind = _safely(lambda: text(type(error).__name__), otherwise="an exception without a name")
    said = _safely(lambda: text(str(error)), otherwise="(its message can't be shown)")
    return f"{kind}: {(said.strip().splitlines() or ['(no message)'])[0]}"


def _safely(look: Callable[..., str], *arguments: Any, otherwise: str) -> str:
    """Return what `look` finds; an exception's class may raise when it is inspected."""
    try:
        return look(*arguments)
    except BaseException:
        return otherwise


def user_traceback(error: BaseException, begins: str = "") -> str:
    """The traceback without the frames that led into the user's code; `begins` instead of one without theirs."""
    return _safely(_traceback, error, begins, otherwise=begins)


def _traceback(error: BaseException, begins: str) -> str:
    frame = user_frames(error)
    if _are_many(error):
        led = f"(more than {MOST_LINKED} exceptions led to it or are in it; they are left out)"
        parts = ["Traceback (most recent call last):\n", *traceback.format_tb(frame), f"{headline(error)}\n{led}"]
    else:
        parts = traceback.format_exception(type(error), error, frame)
    shown = text("".join(parts)).rstrip()
    shown = f"{begins}\n{shown}" if frame is None and begins else shown
    half = TRACEBACK_LENGTH // 2
    return shown if len(shown) <= TRACEBACK_LENGTH else f"{shown[:half]}\n...\n{shown[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """The frames from the first of the user's code on; None where all are ours."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(CALLERS):
        frame = frame.tb_next
    return frame


def _are_many(error: BaseException) -> bool:
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


def definition_line(call: Any) -> str:
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
    """Return a plain string without lone surrogates and control characters, for files and terminals."""
    return plain(str.encode(value, errors="backslashreplace").decode())
