"""Read and write `status.json`, the state of a run. A killed run still has the state `running`; `state_now` checks the
lock."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlfuse.config.secrets import hidden, hidden_command, hidden_text
from rlfuse.files import not_written, sync, write_atomically
from rlfuse.parsing import parse_json
from rlfuse.run_folder import run_lock

FILE = "status.json"
RESERVED, RESERVED_BYTES = ".reserved", 1 << 20
"""File that reserves disk space during a run, for the last rows and the status at its end."""
COMMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a run since its last start."""

    state: str
    """`running`, `finished`, `stopped` (by a user or scheduler) or `failed`; from `state_now` also `crashed`."""
    name: str
    command: str
    """Command line as typed, secrets redacted; empty if called from a program."""
    commit: str
    sweep: str
    host: str
    pid: int
    started: float
    total: int = 0
    ended: float | None = None
    error: str = ""
    earlier_s: float = 0.0
    label: str = ""

    def seconds(self, last_seen: float) -> float:
        """Return the total seconds of all processes of the run. `last_seen`: `last_log_write`, used if `ended` is
        missing."""
        return self.earlier_s + max(0.0, (self.ended or last_seen) - self.started)


def state_now(folder: Path, found: Status) -> str:
    """Return the run's `state`; `crashed` if its driver ended without writing a final state."""
    if found.state != "running":
        return found.state
    alive = run_lock.is_locked(folder)
    if alive is None:
        alive = found.host != socket.gethostname() or time.time() - run_lock.last_write(folder) < run_lock.SILENT_S
    return "running" if alive else "crashed"


def begin(folder: Path, name: str, started: float, total: int = 0, label: str = "") -> None:
    """Record that the run is running in this process. Raises NotWritten if the disk is full."""
    try:
        (folder / RESERVED).write_bytes(os.urandom(RESERVED_BYTES))  # random, so that file systems can't compress it
        sync(folder / RESERVED)
    except OSError as error:
        release_reserve(folder)
        raise not_written(folder / RESERVED, "reserving disk space for the end of the run failed", error) from error
    sweep, earlier_s = os.environ.get("WANDB_RUN_GROUP", ""), _seconds_before(folder, started)
    process = (hidden_command(typed_command()), _commit(), sweep, socket.gethostname(), os.getpid())
    _write(folder, Status("running", name, *process, started, total, earlier_s=earlier_s, label=label))


def _seconds_before(folder: Path, started: float) -> float:
    if (before := read(folder)) is None:
        return 0.0
    return before.earlier_s if before.started == started else before.seconds(run_lock.last_log_write(folder))


def release_reserve(folder: Path) -> None:
    """Free the reserved disk space, at the end of the run."""
    with suppress(OSError):
        (folder / RESERVED).unlink()


def end(folder: Path, state: str, error: str = "", ended: float | None = None) -> None:
    """Record the end of a run. `state`: finished, stopped or failed; `ended`: epoch seconds, by default now."""
    release_reserve(folder)
    if (status := read(folder)) is not None:
        when = time.time() if ended is None else ended
        _write(folder, replace(status, state=state, ended=when, error=hidden_text(error)))


def read(folder: Path) -> Status | None:
    """Return the status of a run; None if it is missing or invalid."""
    try:
        found = Status(**parse_json((folder / FILE).read_text()))
        time.localtime(found.started), time.localtime(found.ended or 0.0)
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    texts = (found.state, found.name, found.command, found.commit, found.sweep, found.host, found.error, found.label)
    numbers = (found.pid, found.total, found.started, found.ended or 0.0, found.earlier_s)
    is_valid = all(isinstance(each, str) for each in texts) and all(isinstance(each, int | float) for each in numbers)
    return found if is_valid else None


def _write(folder: Path, status: Status) -> None:
    write_atomically(folder / FILE, json.dumps(hidden(asdict(status)), indent=2))


def typed_command() -> str:
    """Return the command line of this process; empty if called from a program."""
    words = list(sys.orig_argv)
    if words[1:2] == ["-P"]:
        del words[1]
    for number, word in enumerate(words):
        if Path(word).name == "rlfuse":
            return shlex.join(["rlfuse", *words[number + 1 :]])
    return shlex.join(["python", *words[1:]]) if "-m" in words[1:2] and words[2].startswith("rlfuse") else ""


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            capture_output=True, text=True, timeout=COMMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
