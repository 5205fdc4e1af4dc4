"""Describe exceptions of custom code: one line, and a traceback that begins in that code.

Inspecting an exception may run code of its class; these functions never raise, and they return printable text.
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
from rlfuse.errors import FunctionError

CALLERS = (
    *(str(Path(__file__).parents[1] / package) for package in ("algorithms", "config", "fusion", "observe", "rewards")),
    str(Path(asyncio.__file__).parent),
    inspect.__file__,
    "<frozen importlib",
)
"""Prefixes of files whose frames only lead to the user's code."""
TRACEBACK_LENGTH = 20_000
MAX_LINKED = 100
"""Maximum length of an exception chain or group that is shown; the cost of handling one grows with its length."""


def headline(error: BaseException) -> str:
    """Return the type and message of an exception on one line."""
    kind = _safely(lambda: text(type(error).__name__), otherwise="an exception without a name")
    message = _safely(lambda: text(str(error)), otherwise="(its message can't be shown)")
    return f"{kind}: {(message.strip().splitlines() or ['(no message)'])[0]}"


def _safely(inspect_error: Callable[..., str], *arguments: Any, otherwise: str) -> str:
    """Return `inspect_error(*arguments)`, or `otherwise` if the exception's class raises when inspected."""
    try:
        return inspect_error(*arguments)
    except BaseException:
        return otherwise


def user_traceback(error: BaseException, begins: str = "") -> str:
    """Return the traceback from the first frame of the user's code; after `begins` if it has no such frame."""
    return _safely(_traceback, error, begins, otherwise=begins)


def _traceback(error: BaseException, begins: str) -> str:
    frame = user_frames(error)
    if _is_long_chain(error):
        omitted = f"(more than {MAX_LINKED} linked exceptions are omitted)"
        parts = ["Traceback (most recent call last):\n", *traceback.format_tb(frame), f"{headline(error)}\n{omitted}"]
    else:
        parts = traceback.format_exception(type(error), error, frame)
    shown = text("".join(parts)).rstrip()
    shown = f"{begins}\n{shown}" if frame is None and begins else shown
    half = TRACEBACK_LENGTH // 2
    return shown if len(shown) <= TRACEBACK_LENGTH else f"{shown[:half]}\n...\n{shown[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code on; None if it has none."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(CALLERS):
        frame = frame.tb_next
    return frame


def _is_long_chain(error: BaseException) -> bool:
    seen, waiting = set(), [error]
    while waiting and len(seen) <= MAX_LINKED:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += one.__cause__, one.__context__
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return len(seen) > MAX_LINKED


def function_error(what: str, error: BaseException, function: Any) -> FunctionError:
    """Return the error to raise for a custom function; `what` names it, as `KEY=VALUE`."""
    return FunctionError(f"{what} raised {headline(error)}\n{user_traceback(error, definition_line(function))}")


def definition_line(call: Any) -> str:
    """Return where a function is defined, in the format of a traceback; empty if it has no Python code."""
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
