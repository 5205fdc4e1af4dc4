"""Keep the output of each process of a run in its own file: `logs/rollout-0.log`, `logs/trainer-1.log`, ...

Native code and child processes are included. A file survives restarts and keeps the newest MOST bytes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlfuse.config.secrets import hidden_text

FOLDER = "RLFUSE_LOGS"
MAX_BYTES, KEPT_BYTES = 10 << 20, 5 << 20
"""Maximum size of a file, and its size after truncation."""
LOOK_S = 5.0
LAST = 1 << 16
BEGINNING = re.compile(rb"^== \S+: process (\d+) on .*$", re.M)


def begin(folder: Path) -> None:
    """Let workers that start from now on write their output to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder)


def end() -> None:
    """Stop logging; an empty folder is removed."""
    folder = Path(os.environ.pop(FOLDER))
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def logs_kept_on_failure(folder: Path) -> Iterator[None]:
    """Keep logs in `folder` during the block; delete them unless it fails."""
    begin(folder)
    try:
        yield
    except BaseException:
        end()
        raise
    end()
    shutil.rmtree(folder, ignore_errors=True)


def folder() -> Path | None:
    """Return the log folder of the current run; None outside a run and on hosts without access to it."""
    path = Path(os.environ.get(FOLDER, ""))
    return path if os.environ.get(FOLDER) and path.is_dir() else None


def file_of(where: str) -> Path | None:
    """Return the log path of a process (`rollout/0`), existing or not; None outside a run."""
    within = folder()
    return within / f"{where.replace('/', '-')}.log" if within else None


def redirect_output(where: str) -> None:
    """Redirect the output of this process and its children to its log."""
    path = file_of(where)
    if path is None:
        return
    began = f"== {where}: process {os.getpid()} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    log = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.write(log, began.encode())
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, number)
    os.close(log)
    threading.Thread(target=_bound, args=(path, began.encode()), daemon=True, name="log size").start()


def append(where: str, text: str) -> None:
    """Append text to a worker's log from the driver, e.g. a traceback that Ray returned."""
    path = file_of(where)
    if path is not None:
        with suppress(OSError), path.open("a") as file:  # a full disk is reported elsewhere
            file.write(f"{hidden_text(text.rstrip())}\n")


def last_output(where: str, pid: str) -> str | None:
    """Return the latest output of a process; None if this host has none."""
    path = file_of(where)
    if path is None or not path.is_file():
        return None
    content = path.read_bytes()
    beginnings = [found for found in BEGINNING.finditer(content) if found[1].decode() == pid]
    return content[beginnings[-1].end() :][-LAST:].decode(errors="replace") if beginnings else None


def log_hint(where: str) -> str:
    """Return a line with the location of the logs for error messages; empty outside a run."""
    path = file_of(where)
    if path is None:
        return ""
    return f"logs: {path.parent}" + (f" ({path.name} has the error)" if path.is_file() else "")


def _bound(path: Path, began: bytes) -> None:
    while True:
        with suppress(OSError):  # the folder was removed, or the disk is full
            if path.stat().st_size > MAX_BYTES:
                cut(path, began)
        time.sleep(LOOK_S)


def cut(path: Path, began: bytes) -> None:
    """Leave the newest KEPT bytes, in the same file: who writes appends, wherever that ends."""
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) <= MAX_BYTES:
            return
        file.seek(-KEPT_BYTES, os.SEEK_END)
        kept = file.read()
        rest = kept.partition(b"\n")[2] or kept  # progress bars have no line ends
        file.truncate(0)
    with path.open("ab") as file:
        file.write(began + b"(earlier output was removed)\n" + rest)
