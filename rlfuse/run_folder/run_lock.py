"""Lock a run folder: one driver at a time, until the end of its process.

Processes of one kernel use `flock` on `driver.lock`. From another host, or without flock, a driver is alive if it keeps
writing files; it updates `driver.lock` every BEAT_S. `check` detects that the folder was removed or taken over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from rlfuse.clock import BOOT
from rlfuse.errors import NotWritable, RunError
from rlfuse.parsing import parse_json

FILE = "driver.lock"
SIGNS = ("live.json", "metrics.jsonl", "events.jsonl", "status.json")
BEAT_S = 1.0
SILENT_S = 20.0
"""A driver on another host that has written nothing for this long is considered dead."""
STALE_S = 3600.0
"""Files older than this are not watched for new writes; clocks of hosts are assumed to differ by less."""
PROBED_S = 1.0

_held: set[int] = set()


def _close_in_fork() -> None:
    """Close the lock in a forked child, which must not keep the lock of a driver that has ended."""
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_fork)


class RunLock:
    """The lock of one run folder, in the process that runs it."""

    def __init__(self) -> None:
        self.folder = Path()
        self._file, self._id = -1, uuid.uuid4().hex
        self._released, self._beating = threading.Event(), threading.Thread()

    @property
    def is_held(self) -> bool:
        return self._file in _held

    def acquire(self, folder: Path) -> bool:
        """Lock an existing folder; return False if another driver uses it. Raises NotWritable if the file can't be
        made."""
        path, until = folder / FILE, time.monotonic() + PROBED_S
        while True:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise NotWritable(path, error.strerror) from error
            locked = _flock(file, fcntl.LOCK_EX)
            if locked is not False and _is_at(file, path):
                break
            os.close(file)
            if locked is False and time.monotonic() > until:
                return False
            time.sleep(PROBED_S / 20)
        try:
            if (locked is None or not _of_this_kernel(file)) and not self._claim(file, folder):
                os.close(file)
                return False
            self._write(file)
        except OSError:
            os.close(file)
            raise
        self.folder, self._file = folder, file
        _held.add(file)
        self._released.clear()
        self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._beating.start()
        return True

    def _claim(self, file: int, folder: Path) -> bool:
        """Claim the folder without a reliable flock: of two simultaneous claims, the last to write wins."""
        seen = last_write(folder)
        time.sleep(2 * BEAT_S)
        if last_write(folder) != seen:
            return False
        self._write(file)
        time.sleep(2 * BEAT_S)
        return _content(file).get("id") == self._id

    def _write(self, file: int) -> None:
        content = {"id": self._id, "boot": BOOT, "host": socket.gethostname(), "pid": os.getpid()}
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(content).encode(), 0)
        os.fsync(file)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._file)

    def check(self) -> None:
        if not self.is_held:
            return
        if not _is_at(self._file, self.folder / FILE):
            raise RunError(
                f"{self.folder} was removed or replaced while the run was writing to it ({FILE} is gone), so the run "
                "has ended. Start it again, and remove run folders only after their runs have ended."
            )
        if (other := _content(self._file)).get("id") != self._id:
            raise RunError(
                f"{self.folder} was taken over by process {other.get('pid')} on {other.get('host')}, while this "
                f"process ({os.getpid()} on {socket.gethostname()}) wrote nothing for {SILENT_S:g} s. This one has "
                "ended; the other continues the run."
            )

    def release(self) -> None:
        if self.is_held:
            self._released.set()
            self._beating.join()
            if _content(self._file).get("id") == self._id:
                os.truncate(self._file, 0)  # so that the next process need not wait
            _held.remove(self._file)
            os.close(self._file)


def is_locked(folder: Path) -> bool | None:
    """Return whether a driver has locked the folder; None if flock can't decide."""
    try:
        file = os.open(folder / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        locked = _flock(file, fcntl.LOCK_SH)
        if locked:
            return False if _of_this_kernel(file) else None
        return None if locked is None else True
    finally:
        os.close(file)


def is_written(folder: Path) -> bool:
    """Return whether a driver writes to the folder; watches it for up to SILENT_S."""
    seen, until = last_write(folder), time.monotonic() + SILENT_S
    if time.time() - seen > STALE_S:
        return False
    while time.monotonic() < until:
        time.sleep(SILENT_S / 20)
        if last_write(folder) != seen:
            return True
    return False


def last_write(folder: Path) -> float:
    """Return `last_log_write` or the last heartbeat, if later; also counts commands that take the lock briefly."""
    return max(last_log_write(folder), _written(folder / FILE))


def last_log_write(folder: Path) -> float:
    """Return when a run last wrote a log or status file, in epoch seconds; 0 if never."""
    return max(_written(folder / sign) for sign in SIGNS)


def _written(path: Path) -> float:
    with suppress(OSError), path.open("rb") as file:  # opening a file refreshes the cache of network file systems
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _flock(file: int, kind: int) -> bool | None:
    """Return whether the lock was obtained; None if the file system has none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`; True if the file system does not respond."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def _of_this_kernel(file: int) -> bool:
    content = _content(file)
    return not content or content.get("boot") == BOOT


def _content(file: int) -> dict[str, object]:
    with suppress(ValueError):
        found = parse_json(os.pread(file, 4096, 0) or b"{}")
        return found if isinstance(found, dict) else {}
    return {}
