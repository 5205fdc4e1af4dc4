"""Files that survive kills and full disks: JSON lines to which a run adds rows, small files replaced whole, syncing.

Role: the one reader and writer of rows for reports, notebooks, summaries and resumed runs. What must outlive a power
loss is synced by the node that wrote it: where several nodes share a file system, only that one can be sure.
Invariants: a row is a line that decodes to an object and has its end. A writer that was killed leaves at most one that
is not, the last: readers leave it out and warn, whoever goes on with the file cuts it off. Anywhere else such a line is
damage that nobody should guess about. Rows that find no room on the disk leave the file as it was. Files that a command
adds to, or writes several of, are `write_lock` by one process at a time.
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
"""Errors that mean another place would do; a full disk is none."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, a quota, or a limit on the size of files."""


def read_rows(
    path: Path, wanted: Callable[[str], bool] = lambda line: True, opened: IO[bytes] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a file, oldest first; none where there is no file. RunError for a damaged line, but for the last.

    `wanted` judges lines before they are parsed, which takes most of the time. `opened`: the file, if it may have been
    renamed since. One whose name ends in .gz is decompressed.
    """
    for row, _ in _rows(path, wanted, opened):
        yield row


NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Texts for the numbers that JSON lacks."""


def json_safe(value: Any) -> Any:
    """`value` with texts in place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(float(value))
    if isinstance(value, dict):
        return {key: json_safe(each) for key, each in value.items()}
    return [json_safe(each) for each in value] if isinstance(value, list | tuple) else value


def parse_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics with NaN and infinity in place of their texts."""
    return {name: NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


class RowFile:
    """Adds rows to a file. What is there stays up to the first row that `keep` refuses, and but for one cut short."""

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None):
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_whole(path) if keep is None else _kept(path, keep))

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """All of them, or NotWritten and none."""
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
        """Bytes so far."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Have the disk keep what was added, also where power is lost."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _rows(
    path: Path, wanted: Callable[[str], bool], opened: IO[bytes] | None = None
) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row, and the byte where its line ends."""
    if opened is None and not path.exists():
        return
    with opened or (gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as lines:
        end = 0
        for number, line in enumerate(lines, 1):
            start, end = end, end + len(line)
            try:
                row = _decoded(line, wanted)
            except ValueError as error:
                if line.endswith(b"\n") and lines.read(1):  # one without is the last, though its writer may go on now
                    raise RunError(f"{path}, line {number}: {error}; remove that line") from error
                return _warn(path, start)
            if row is not None:
                yield row, end


def _decoded(line: bytes, wanted: Callable[[str], bool] = lambda line: True) -> dict[str, Any] | None:
    """The row of a line, None if it is not wanted; ValueError if it is none."""
    text = line.decode()
    if not text.endswith("\n"):
        raise ValueError("the line has no end")
    if not wanted(text):
        return None
    row = parse_json(text)
    if not isinstance(row, dict):
        raise ValueError(f"{text[:40].strip()} is no object")
    return row


def _kept(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Bytes up to the first row that is refused. RunError for one without what `keep` looks at."""
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
    """Bytes up to a last line that is no row. Reads that line alone: files of events are long."""
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
    warnings.warn(f"{path}: the last row, from byte {start} on, was cut short, and is left out", stacklevel=2)


def not_written(path: Path, what: str, error: OSError) -> NotWritten:
    """Return the error for a file that a full disk keeps from being written."""
    free = shutil.disk_usage(path.parent).free / 2**20
    return NotWritten(
        f"{path}: {what} ({error.strerror}); {path.parent} has {free:,.1f} MiB free. Free disk space there and rerun "
        "the command; what was written before is complete."
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file aside and rename it: whoever is killed, or finds no room, leaves what there was. NotWritten then."""
    with atomic_write(path) as aside:
        aside.write_text(text)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file there replaces `path` when the body ends, and is removed where it raises.

    Other processes may do the same. What is no regular file (`/dev/stdout`, a pipe) is written to directly. Raises
    NotWritable, a UserError, where no file can be made there, and NotWritten where the disk is full.
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
    """Hold the lock of what one process at a time may write; UserError where another holds it, or it can't be made.

    `path`: the file, or one of several that are written together. The lock ends with the process, however that ends.
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
            with suppress(OSError):  # it ends just now
                holder = place.read_text() or holder
            raise RunError(f"{path}: {holder} is writing there. Wait for it to end, or choose another place.")
        place.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            place.unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # not empty
                    path.parent.rmdir()


def is_write_locked(path: Path) -> bool:
    """Whether a process holds the lock of `path`."""
    place = _lock_of(path)
    if not place.exists():
        return False
    with _locked(place) as held:
        return not held


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Whether the body has the lock."""
    while True:
        with place.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # network file systems may have no locks
                pass
            if place.exists() and os.path.samestat(os.fstat(file.fileno()), place.stat()):  # not removed in between
                yield True
                return


def sync_all(path: Path) -> None:
    """As `sync`, of a folder with everything below it; or of a file."""
    for each in (*path.rglob("*"), path):
        with suppress(FileNotFoundError):  # another's temporary file
            sync(each)


def sync(path: Path) -> None:
    """Have the disk keep what a file holds, or the names that a folder holds. OSError where it can't."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have nothing to do for a folder
            raise
    finally:
        os.close(descriptor)
