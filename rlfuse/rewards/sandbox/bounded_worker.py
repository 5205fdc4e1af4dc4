"""Serve the calls of a `bounded.BoundedFunction`, confined like untrusted code and with a CPU timer for each call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from rlfuse.rewards.sandbox.confinement import confine_calls, confine_files, limit
from rlfuse.rewards.sandbox.messages import receive, send

MEMORY_BYTES = 2 * 2**30
CPU_S = 24 * 3600
TEXT = 300
USED_UP = 76
"""Exit status of a process that ran out of memory in a later call than its first: earlier ones may hold it."""


def serve(function: Callable[[Any], Any]) -> None:
    """Answer with the function's value, or with what it raised."""
    limit(MEMORY_BYTES, CPU_S, 0, 64)
    confine_files()
    confine_calls()
    replies, silent = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)  # nobody reads the warnings of libraries
    send(replies, {})
    is_fresh = True
    while True:
        try:
            request = receive(0)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF ends the process
        send(replies, _answer(function, request["argument"], is_fresh))
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_fresh = False


def _answer(function: Callable[[Any], Any], argument: Any, is_fresh: bool) -> dict[str, Any]:
    try:
        return {"value": function(argument)}
    except MemoryError as error:
        if not is_fresh:
            os._exit(USED_UP)
        return {"refused": f"MemoryError: {error}"[:TEXT]}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:TEXT]}
