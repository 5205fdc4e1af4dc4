"""Run a job from a notebook in a separate process: `train` waits for it, `start` returns.

An interrupted cell or a time limit stops the job as Ctrl-C does, with a checkpoint; a second interrupt ends it at once.
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
"""For the step under way of a job that was told to stop; then it is told to end at once."""
STOPPING_S = 60.0
KEPT = 60
KERNEL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "MPLBACKEND")
"""What a notebook's kernel sets for itself: the job writes to a pipe and draws to files."""


class JobError(RuntimeError):
    """A job that ended badly, or not in time. The message has the end of what it printed."""


class Job:
    """One running job."""

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
            start_new_session=True,  # the notebook's interrupt reaches it through `stop`, once
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._here = f"{Path.cwd()}/"  # left out of what is shown: notebooks are shared
        self._last: deque[str] = deque(maxlen=KEPT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def follow(self, timeout_s: float = 3600.0, show: Callable[[str], None] = print) -> Path:
        """Show lines until the job ends, and return the run folder. JobError otherwise."""
        deadline = time.monotonic() + timeout_s
        try:
            while (line := self._lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                show(line)
            self._lines.put(None)  # for whoever follows again
            status = self._process.wait(STOPPING_S)
        except (queue.Empty, subprocess.TimeoutExpired):
            self.stop()
            raise JobError(
                f"the job took longer than timeout_s={timeout_s:g} and was stopped; raise it, or look at {self.folder}."
                f" The same command goes on from the last checkpoint.\n{self._end()}"
            ) from None
        except BaseException:
            self.stop()
            raise
        if status:
            raise JobError(f"the job ended with status {status}:\n{self._end()}")
        return self.folder

    def stop(self, step_s: float = STEP_S, show: Callable[[str], None] = print) -> None:
        """Stop the job with a checkpoint within `step_s`, then end or kill it."""
        if not self.running:
            return
        show(f"stopping; the step under way may take {step_s:g} s, another interrupt ends it at once")
        try:
            self._tell(step_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            try:
                self._tell(STOPPING_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(STOPPING_S)
        self._reader.join(STOPPING_S)
        if self._last:
            show(self._last[-1])

    def _tell(self, wait_s: float) -> None:
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
    """Start the job of these words. ConfigError or RunRefused if it cannot start."""
    try:
        folder = accept(load(list(words))).config.run_folder
    except NothingToDo as end:  # as the job will say
        folder = end.folder
    name = folder.name.replace("'", "\\'")
    # Said again: a name made of the time would be another one in the job's process.
    named = f"trainer.experiment_name='{name}'"
    return Job(folder, [sys.executable, "-P", "-m", "rlfuse.train", *words, named])


def train(*words: str, timeout_s: float = 3600.0) -> Path:
    """Start a job and follow it to its end: the run folder. See `start` and `Job.follow`."""
    return start(*words).follow(timeout_s)
