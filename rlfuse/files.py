"""Files that survive kills and full disks: JSON Lines files, small files written atomically, syncing.

Role: the only reader and writer of rows, for reports, notebooks, summaries and resumed runs. Files that must survive a
power loss are synced by the node that wrote them: on a shared file system other nodes cannot ensure this.
Invariants: a row is a complete line with a JSON object. A killed writer leaves at most one incomplete line, the last:
readers skip it with a warning, the next writer truncates it; an invalid line elsewhere is an error. A failed append
leaves the file unchanged. Files that a command extends are protected by `write_lock`.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import math
import mmap
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlfuse.errors import NotWritable, NotWritten, RunError
from rlfuse.parsing import parse_json

UNWRITABLE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
"""Errors that another path would avoid; a full disk is not among them."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, a quota, or a limit on the size of files."""


def read_rows(
    path: Path, wanted: Callable[[str], bool] = lambda line: True, opened: IO[bytes] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, oldest first; none if there is no file. RunError for a damaged line before the last.

    `wanted` filters lines before they are parsed, which takes most of the time. `opened`: the open file, for a path
    that may be renamed meanwhile. Files ending in .gz are decompressed.
    """
    for row, _ in _rows(path, wanted, opened):
        yield row


NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON strings for non-finite numbers."""


def json_safe(value: Any) -> Any:
    """Return `value` with NaN and infinity as strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(float(value))
    if isinstance(value, dict):
        return {key: json_safe(each) for key, each in value.items()}
    return [json_safe(each) for each in value] if isinstance(value, list | tuple) else value


def parse_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of metrics with NaN and infinity as numbers again."""
    return {name: NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


class RowFile:
    """Append rows to a file. Existing rows are kept up to the first that `keep` rejects; an incomplete one is cut."""

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None):
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_whole(path) if keep is None else _kept(path, keep))

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append all rows, or raise NotWritten and append none."""
        text = "".join(json.dumps(row, separators=(",", ":"), default=str) + "\n" for row in rows)
        before, left = self.size, memoryview(text.encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(before)
            raise not_written(self.path, f"{len(text):,} bytes could not be added", error) from error

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Flush the rows to disk, so that they survive a power loss."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _rows(
    path: Path, wanted: Callable[[str], bool], opened: IO[bytes] | None = None
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row with the byte offset of its end."""
    if opened is None and not path.exists():
        return
    with opened or (gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as lines:
        end = 0
        for number, line in enumerate(lines, 1):
            start, end = end, end + len(line)
            try:
                row = _decoded(line, wanted)
            except ValueError as error:
                if line.endswith(b"\n") and lines.read(1):  # an incomplete last line is skipped
                    raise RunError(f"{path}, line {number}: {error}; remove that line") from error
                return _warn(path, start)
            if row is not None:
                yield row, end


def _decoded(line: bytes, wanted: Callable[[str], bool] = lambda line: True) -> dict[str, Any] | None:
    """Parse the row of a line; None if it is not wanted. ValueError if it is not a row."""
    text = line.decode()
    if not text.endswith("\n"):
        raise ValueError("the line is incomplete")
    if not wanted(text):
        return None
    row = parse_json(text)
    if not isinstance(row, dict):
        raise ValueError(f"{text[:40].strip()} is not a JSON object")
    return row


def _kept(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Return the byte offset of the first rejected row. RunError for a row without the fields that `keep` reads."""
    kept = 0
    for row, end in _rows(path, lambda line: True):
        try:
            if not keep(row):
                break
        except (KeyError, TypeError) as error:
            raise RunError(f"{path}, the row at byte {kept}: {error!r}; correct or remove that line") from error
        kept = end
    return kept


def _whole(path: Path) -> int:
    """Return the byte offset of the end of the last complete row. Reads only the last line: event files are long."""
    if not (size := path.stat().st_size):
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(b"\n", 0, size - 1) + 1
        try:
            _decoded(content[start:])
        except ValueError:
            _warn(path, start)
            return start
    return size


def _warn(path: Path, start: int) -> None:
    warnings.warn(f"{path}: skipping the last row (from byte {start}), which is incomplete", stacklevel=2)


def not_written(path: Path, what: str, error: OSError) -> NotWritten:
    """Return the error for a file that could not be written because the disk is full."""
    free = shutil.disk_usage(path.parent).free / 2**20
    return NotWritten(
        f"{path}: {what} ({error.strerror}); {path.parent} has {free:,.1f} MiB free. Free disk space there and rerun "
        "the command; everything written before is complete."
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that a kill or a full disk (NotWritten) keeps the previous file."""
    with atomic_write(path) as aside:
        aside.write_text(text)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; its file replaces `path` when the body ends, and is removed if the body raises.

    Safe for concurrent writers. Paths that are not regular files (`/dev/stdout`, a pipe) are written to directly.
    Raises NotWritable if the file cannot be created, and NotWritten if the disk is full.
    """
    path = path.resolve()
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        yield path
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    except OSError as error:
        if error.errno in UNWRITABLE and str(error.filename) == str(aside):
            raise NotWritable(path, error.strerror) from error
        if error.errno in FULL:
            raise not_written(path, "the file could not be written", error) from error
        raise
    finally:
        with suppress(OSError):
            aside.unlink()


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the exclusive lock for writing `path`; UserError if another process holds it or it cannot be created.

    `path`: the file, or one of several that are written together. The lock is released when the process ends.
    """
    place = _lock_of(path)
    made = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    except OSError as error:
        raise NotWritable(path, error.strerror) from error
    with _locked(place) as held:
        if not held:
            holder = "another process"
            with suppress(OSError):  # released meanwhile
                holder = place.read_text() or holder
            raise RunError(f"{path}: {holder} is writing this file. Wait for it to end, or choose another path.")
        place.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            place.unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # not empty
                    path.parent.rmdir()


def is_write_locked(path: Path) -> bool:
    """Return whether a process holds the write lock of `path`."""
    place = _lock_of(path)
    if not place.exists():
        return False
    with _locked(place) as held:
        return not held


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Yield whether the lock was acquired."""
    while True:
        with place.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # some network file systems have no locks
                pass
            if place.exists() and os.path.samestat(os.fstat(file.fileno()), place.stat()):  # not removed meanwhile
                yield True
                return


def sync_all(path: Path) -> None:
    """Sync a file, or a folder with everything in it."""
    for each in (*path.rglob("*"), path):
        with suppress(FileNotFoundError):  # a temporary file of another process
            sync(each)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk. OSError if that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not support it for folders
            raise
    finally:
        os.close(descriptor)
