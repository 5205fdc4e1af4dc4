"""What became of a run: `status.json` of its folder, written when it starts and when it ends.

Role: `rlfuse.run.job` writes it; lists of runs, reports and the live view of a run that goes on elsewhere read it. A
run that was killed could not say so: its file still says `running`, and `Status.now` looks for its process.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from rlfuse.config.secrets import hidden, hidden_command, hidden_text
from rlfuse.files import write_whole

FILE = "status.json"
SIGNS = ("live.json", "metrics.jsonl", "events.jsonl", FILE)
"""Files that a run which goes on writes to."""
COMMIT_S = 5.0
"""For git to tell the commit."""


@dataclass(frozen=True, slots=True)
class Status:
    """One run, from its last start on."""

    state: str
    """running | finished | stopped (a person or a scheduler ended it) | failed; from `now` also crashed."""
    name: str
    """project/experiment."""
    command: str
    """As it was typed, secrets hidden; empty where a program called."""
    commit: str
    """Of the working folder; empty outside a repository, with `+` behind it where files differ."""
    sweep: str
    """The group of its sweep; empty for a single run."""
    host: str
    pid: int
    created: float
    """When its process began, epoch seconds: a number alone may be another process by now."""
    started: float
    total: int = 0
    """Steps of the whole run; 0 where that is not known."""
    ended: float | None = None
    error: str = ""
    """The message of a run that failed or was stopped."""
    earlier_s: float = 0.0
    """Seconds of the processes that had the run before this one."""
    label: str = ""
    """Of the steps before the checkpoint that this process resumed from."""

    def seconds(self, heard: float) -> float:
        """Of all processes of the run so far; `heard`: the `last_sign` of one that could not say how it ended."""
        return self.earlier_s + max(0.0, (self.ended or heard) - self.started)

    @property
    def now(self) -> str:
        """`state`, or `crashed` where the process that said `running` is gone from this host."""
        if self.state != "running" or self.host != socket.gethostname():
            return self.state
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1
            lives = same and process.status() != psutil.STATUS_ZOMBIE  # killed, and nobody has asked how it ended
        except psutil.NoSuchProcess:
            lives = False
        return "running" if lives else "crashed"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While no other process checks whether this run is running, begins it, or removes what it left."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems of networks may have no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def begin(folder: Path, name: str, started: float, total: int = 0, label: str = "") -> None:
    """The run of this folder, of so many steps in `total`, continues in this process after steps with this label."""
    process, sweep = psutil.Process(), os.environ.get("WANDB_RUN_GROUP", "")
    host, earlier_s = socket.gethostname(), _seconds_before(folder, started)
    command, created = hidden_command(typed_command()), process.create_time()
    who = (_commit(), sweep, host, process.pid, created)
    _write(folder, Status("running", name, command, *who, started, total, earlier_s=earlier_s, label=label))


def _seconds_before(folder: Path, started: float) -> float:
    """Of earlier processes; another attempt of the one that started then is none."""
    if (before := read(folder)) is None:
        return 0.0
    return before.earlier_s if before.started == started else before.seconds(last_sign(folder))


def end(folder: Path, state: str, error: str = "") -> None:
    """It is over. `state`: finished, stopped or failed."""
    if (status := read(folder)) is not None:
        _write(folder, replace(status, state=state, ended=time.time(), error=hidden_text(error)))


def read(folder: Path) -> Status | None:
    """None where there is none, or one that can't be read."""
    try:
        return Status(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def last_sign(folder: Path) -> float:
    """When a run last wrote something, in seconds since the epoch; 0 where there is nothing."""
    return max((file.stat().st_mtime for sign in SIGNS if (file := folder / sign).exists()), default=0.0)


def _write(folder: Path, status: Status) -> None:
    write_whole(folder / FILE, json.dumps(hidden(asdict(status)), indent=2))


def typed_command() -> str:
    """How this process was started, for a shell; empty where a program calls."""
    words = list(sys.orig_argv)
    for number, word in enumerate(words):
        if Path(word).name == "rlfuse":
            return shlex.join(["rlfuse", *words[number + 1 :]])
    return shlex.join(["python", *words[1:]]) if "-m" in words[1:2] and words[2].startswith("rlfuse") else ""


def _commit() -> str:
    """By git, which may be missing, as may be a repository."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            capture_output=True, text=True, timeout=COMMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
