"""Run a command of rlfuse in a separate process, show its output, and raise its errors.

An interrupt of the program or notebook cell, or the time limit, stops a job like Ctrl-C, with a checkpoint. A second
interrupt ends it at once, a third kills it.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from rlfuse.console import plain
from rlfuse.error_file import VARIABLE, read_error
from rlfuse.errors import RlfuseError

STEP_S = 600.0
"""Time for the current step after a stop request; then the job is ended at once."""
STOPPING_S = 60.0
OUTPUT_S = 5.0
"""Time for the last output of an ended job, whose pipe a surviving child process may keep open."""
MAX_LINES = 60
KERNEL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "MPLBACKEND")
"""Environment variables of the notebook kernel that the job must not inherit, because its output is a pipe."""


Result = TypeVar("Result")


class JobError(RlfuseError, RuntimeError):
    """The job was killed, left no error, or exceeded the time limit. The message includes the end of its output."""


class Job(Generic[Result]):
    """Job in a separate process, which writes to `folder`; `result` reads it."""

    def __init__(self, folder: Path, command: list[str], result: Callable[[Path], Result]):
        self.folder, self._result = folder, result
        self._private = tempfile.TemporaryDirectory(prefix="rlfuse-error-")
        self._error = Path(self._private.name) / "error"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: value for name, value in os.environ.items() if name not in KERNEL_VARIABLES}
            | {VARIABLE: str(self._error)},
            start_new_session=True,  # so that `stop` alone forwards an interrupt
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._here = f"{Path.cwd()}/"  # removed from shown lines, because notebooks are shared
        self._last: deque[str] = deque(maxlen=MAX_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._end_output, daemon=True).start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def follow(self, timeout_s: float | None = None, show: Callable[[str], object] = print) -> Result:
        """Pass each line of output to `show` until the job ends, and return its result.

        Raises the error of the job with its causes, or JobError if it left none or took longer than `timeout_s`.
        """
        try:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while (line := self._lines.get(timeout=_left(deadline))) is not None:
                show(line)
            self._lines.put(None)  # for another call of `follow`
            status = self._process.wait(_left(deadline))
        except (queue.Empty, subprocess.TimeoutExpired):
            self.stop()
            raise JobError(
                f"the job took longer than timeout_s={timeout_s:g} and was stopped. Raise it, or see {self.folder}."
                f" The same command resumes from the last checkpoint.\n{self._end()}"
            ) from None
        except BaseException:
            self.stop()
            raise
        if status:
            raise read_error(self._error) or JobError(f"the job ended with status {status}:\n{self._end()}")
        return self._result(self.folder)

    def stop(self, step_s: float = STEP_S, show: Callable[[str], object] = print) -> None:
        """Stop the job with a checkpoint; after `step_s` seconds end it, then kill it."""
        if not self.running:
            return
        show(f"stopping after the current step (at most {step_s:g} s); interrupt again to end the job at once")
        try:
            self._interrupt(step_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            try:
                self._interrupt(STOPPING_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(STOPPING_S)
        self._reader.join(OUTPUT_S)
        if self._last:
            show(self._last[-1])

    def _interrupt(self, wait_s: float) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(wait_s)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            text = plain(line.rstrip()).replace(self._here, "")
            self._last.append(text)
            self._lines.put(text)
        self._lines.put(None)

    def _end_output(self) -> None:
        self._process.wait()
        self._reader.join(OUTPUT_S)
        self._lines.put(None)

    def _end(self) -> str:
        return "\n".join(self._last)


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a time, at least 0; None if there is no limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
