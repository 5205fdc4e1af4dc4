"""Run a job from a notebook in a separate process: `train` waits for it, `start` returns.

An interrupt of the cell, or the time limit, stops the job like Ctrl-C, with a checkpoint. A second interrupt ends it at
once.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rlfuse.config.compose import load
from rlfuse.console import plain
from rlfuse.run.resume.acceptance import NothingToDo, accept

STEP_S = 600.0
"""Time for the current step after a stop request; then the job is ended at once."""
STOPPING_S = 60.0
MAX_LINES = 60
KERNEL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "MPLBACKEND")
"""Environment variables of the notebook kernel that the job must not inherit, because its output is a pipe."""


class JobError(RuntimeError):
    """The job failed or exceeded the time limit. The message includes the end of its output."""


class Job:
    """Job in a separate process."""

    def __init__(self, folder: Path, command: list[str]):
        self.folder = folder
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: value for name, value in os.environ.items() if name not in KERNEL_VARIABLES},
            start_new_session=True,  # so that `stop` alone forwards an interrupt
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._here = f"{Path.cwd()}/"  # removed from shown lines, because notebooks are shared
        self._last: deque[str] = deque(maxlen=MAX_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def follow(self, timeout_s: float = 3600.0, show: Callable[[str], None] = print) -> Path:
        """Show output until the job ends and return the run folder. Raises JobError if it fails or times out."""
        deadline = time.monotonic() + timeout_s
        try:
            while (line := self._lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                show(line)
            self._lines.put(None)  # for another call of `follow`
            status = self._process.wait(STOPPING_S)
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
            raise JobError(f"the job ended with status {status}:\n{self._end()}")
        return self.folder

    def stop(self, step_s: float = STEP_S, show: Callable[[str], None] = print) -> None:
        """Stop the job with a checkpoint; after `step_s` seconds end it, then kill it."""
        if not self.running:
            return
        show(f"stopping after the current step (at most {step_s:g} s); interrupt again to end the job at once")
        try:
            self._interrupt(step_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            try:
                self._interrupt(STOPPING_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(STOPPING_S)
        self._reader.join(STOPPING_S)
        if self._last:
            show(self._last[-1])

    def _interrupt(self, wait_s: float) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(wait_s)

    def _read(self) -> None:
        for line in self._process.stdout:
            text = plain(line.rstrip()).replace(self._here, "")
            self._last.append(text)
            self._lines.put(text)
        self._lines.put(None)

    def _end(self) -> str:
        return "\n".join(self._last)


def start(*words: str) -> Job:
    """Start a job with these command-line words. Raises ConfigError or RunRefused if it cannot start."""
    try:
        folder = accept(load(list(words))).config.run_folder
    except NothingToDo as end:  # the job reports it
        folder = end.folder
    name = folder.name.replace("'", "\\'")
    # Fix the name: a name from the current time would differ in the process of the job.
    named = f"trainer.experiment_name='{name}'"
    return Job(folder, [sys.executable, "-P", "-m", "rlfuse.train", *words, named])


def train(*words: str, timeout_s: float = 3600.0) -> Path:
    """Run a job to its end and return the run folder. See `start` and `Job.follow`."""
    return start(*words).follow(timeout_s)
