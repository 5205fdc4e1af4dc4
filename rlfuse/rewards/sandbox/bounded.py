"""Call a function in a confined process with limits on CPU time and memory.

A call returns a value or raises Refused. The process is kept for the next call, replaced when it was killed, and ends
with its parent. A process that cannot start, or dies for another reason, is replaced once, then a SandboxError.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any

from rlfuse.rewards.sandbox.bare_python import START_S, SandboxError, start_python
from rlfuse.rewards.sandbox.bounded_worker import USED_UP
from rlfuse.rewards.sandbox.messages import MessageError, receive, send

BUSY_S = 20.0
"""So much longer than its CPU time may a call take, where the machine is busy."""


class Refused(ValueError):
    """The function gave no value: it raised, or took too long or too much."""


class BoundedFunction:
    """What the `main` of `module` serves."""

    def __init__(self, module: str):
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __call__(self, argument: Any, seconds: float) -> Any:
        """Return the function's JSON value within so many seconds of CPU time."""
        with self._lock:
            try:
                reply = self._ask(argument, seconds)
            except SandboxError:  # not by the argument: it may do in another process
                reply = self._ask(argument, seconds)
        if "refused" in reply:
            raise Refused(reply["refused"])
        return reply["value"]

    def _ask(self, argument: Any, seconds: float) -> dict[str, Any]:
        process = self._ready()
        try:
            send(process.stdin.fileno(), {"argument": argument, "seconds": seconds})
            return receive(process.stdout.fileno(), deadline=time.monotonic() + seconds + BUSY_S)
        except TimeoutError:
            self._stop()
            raise SandboxError(
                f"{self._module}: got no {seconds:g} s of CPU time in {seconds + BUSY_S:g} s; run less beside it"
            ) from None
        except (EOFError, BrokenPipeError):
            status = process.wait()
            if status == USED_UP:
                raise SandboxError(f"{self._module}: its process had used up its memory") from None
            if status == -signal.SIGKILL:  # which none of its limits does
                raise SandboxError(f"{self._module}: its process was killed from outside") from None
            late = status == -signal.SIGPROF
            raise Refused(f"took longer than {seconds:g} s" if late else "crashed its process") from None

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._process, self._owner = start_python(self._module, "/"), os.getpid()
        try:
            receive(self._process.stdout.fileno(), deadline=time.monotonic() + START_S)
        except (TimeoutError, EOFError, MessageError):
            process = self._process
            self._stop()
            said = process.stderr.read().decode(errors="replace").strip().splitlines() or ["no word"]
            raise SandboxError(f"the process of {self._module} did not start: {said[-1]}") from None
        return self._process

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = None
