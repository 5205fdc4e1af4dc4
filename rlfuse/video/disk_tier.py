"""Keep embeddings of a frozen tower on disk from one run to the next; several runs may share the folder.

Files appear complete; the least recently used ones are removed above `limit_bytes`. Disk errors are counted and
reported, and never stop a run.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from rlfuse.video.embedding import write_bytes

WAIT_S = 60.0


class DiskTier:
    """One node's view of the folder. Writing happens in a thread of its own."""

    def __init__(self, folder: str, limit_bytes: int | None):
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failures = 0
        self.problems: list[str] = []
        self._writer = ThreadPoolExecutor(1, "disk-tier")
        self._saving: dict[str, Future] = {}

    def has(self, key: str) -> bool:
        return self._file(key).exists()

    def load(self, key: str, size: int, target: str) -> bool:
        """Fill the file `target` of `size` bytes; False if there is no such whole entry (any more)."""
        try:
            os.utime(self._file(key))  # used now
            data = np.memmap(self._file(key), np.uint8, "r")
            if len(data) != size:
                raise OSError(f"it has {len(data)} bytes, not {size}")
            write_bytes(target, 0, data)
            return True
        except (OSError, ValueError) as error:  # trimmed by another run, cut short by a crash of the host, empty
            self._problem(f"{self._file(key)} could not be used: {error}")
            return False

    def save(self, key: str, source: str) -> None:
        """Copy the file `source` soon; it must stay until `finish(key)`."""
        self._saving[key] = self._writer.submit(self._copy, key, source)

    def finish(self, key: str) -> None:
        """Wait until `key` is written if it is about to be, at most WAIT_S."""
        if saving := self._saving.get(key):
            wait([saving], WAIT_S)

    def close(self) -> None:
        self._writer.shutdown()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.bf16"

    def _copy(self, key: str, source: str) -> None:
        partial = self.folder / f"{key}.{os.getpid()}.partial"
        try:
            shutil.copyfile(source, partial)
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.rename(partial, self._file(key))
            self._trim()
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._problem(f"embedding {key} could not be saved to {self.folder}: {error}")
        finally:
            self._saving.pop(key, None)

    def _trim(self) -> None:
        if self.limit_bytes is None:
            return
        found = [(file.stat(), file) for file in self.folder.iterdir()]
        excess = sum(status.st_size for status, _ in found) - self.limit_bytes
        for status, file in sorted(found, key=lambda pair: pair[0].st_mtime):
            if excess <= 0:
                return
            file.unlink(missing_ok=True)
            excess -= status.st_size

    def _problem(self, message: str) -> None:
        self.failures += 1
        self.problems.append(message)
