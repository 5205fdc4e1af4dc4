"""Stores of offloaded activations: pinned host memory, and a file on disk.

Role: `activation_offloading` writes, and reads in the order of the backward pass. On CPU hosts only the disk is used.
Invariants: no store exceeds its capacity; copies are ordered by events; the file has no name, so it is removed with its
process, and shrinks as it is read. Waits for the oldest copy if more than `MAX_PENDING_COPIES` are pending.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlfuse.engines.trainer.offloading import pinned
from rlfuse.errors import EngineError

MAX_PENDING_COPIES = 2
"""Maximum pending copies per direction; their device memory adds to that of a layer."""
PIECE_BYTES = 1 << 22
"""Bytes of a piece of pinned memory; storages of any size use several, which are reused."""
PIECES_PER_ALLOCATION = 16
"""Pieces pinned in one call, a power of two like torch's allocations; one call per piece would take seconds in
total."""
PROBE_BYTES = 1 << 26
"""Bytes of the timed copy, and of the pinned buffer between GPU and disk."""
Wait = Callable[[], None]
"""Function that makes later computation wait for a copy."""


class HostMemory:
    """Pinned host memory; bytes are copied on a separate stream during compute."""

    def __init__(self, room: int, cuda: bool):
        self._left = self._unmade = room // PIECE_BYTES
        self._cuda = cuda
        self._free: list[Tensor] = []
        self._stream = torch.cuda.Stream() if cuda else None
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self.written = 0
        """Total bytes written."""

    def has_room(self, size: int) -> bool:
        return _pieces(size) <= self._left

    def write(self, source: Tensor) -> list[Tensor]:
        """Start copying uint8 bytes from the device; `source` stays allocated until they are copied."""
        pieces = self._taken(_pieces(len(source)))
        self.written += len(source)
        with self._copying():
            for part, piece in zip(source.split(PIECE_BYTES), pieces, strict=True):
                piece[: len(part)].copy_(part, non_blocking=True)
        self._leaving.append((self._event(), source))
        self.settle(MAX_PENDING_COPIES)
        return pieces

    def _taken(self, count: int) -> list[Tensor]:
        while len(self._free) < count:
            made = min(PIECES_PER_ALLOCATION, 1 << max(0, self._unmade.bit_length() - 1))
            self._free += pinned(made * PIECE_BYTES, self._cuda).split(PIECE_BYTES)
            self._unmade -= made
        pieces, self._free = self._free[:count], self._free[count:]
        self._left -= count
        return pieces

    def settle(self, under_way: int = 0) -> None:
        """Release the sources of all but `under_way` pending copies; their memory is reused only after the copies."""
        while len(self._leaving) > under_way:
            event, _ = self._leaving.popleft()
            self._after(event)

    def read(self, pieces: list[Tensor], target: Tensor) -> Wait:
        """Start copying written bytes to uint8 `target` on the device."""
        with self._copying():
            for part, piece in zip(target.split(PIECE_BYTES), pieces, strict=True):
                part.copy_(piece[: len(part)], non_blocking=True)
        event = self._event()
        return lambda: self._after(event)

    def free(self, pieces: list[Tensor]) -> None:
        """Return pieces for reuse; later copies into them follow on the same stream."""
        self._free += pieces
        self._left += len(pieces)

    def _copying(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _after(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _pieces(size: int) -> int:
    return -(-size // PIECE_BYTES)


class Disk:
    """File below `folder`, written and read by a thread; GPU data passes through `PROBE_BYTES` of pinned memory."""

    def __init__(self, room: int, cuda: bool, folder: Path):
        self._room, self._folder = room, folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, open for the life of the rank
        except OSError as error:
            raise EngineError(
                f"model.activation_disk_mb: cannot create a file for activations below {folder} ({error.strerror}). "
                "Set trainer.default_local_dir to a folder that ranks can write to, or model.activation_disk_mb=0"
            ) from error
        self._thread = ThreadPoolExecutor(1, "activations")
        self._stream = torch.cuda.Stream() if cuda else None
        self._bounce = pinned(PROBE_BYTES, cuda) if cuda else None
        self._held: dict[int, int] = {}
        self._leaving: deque[tuple[Future, Tensor]] = deque()
        self.written = 0
        """Total bytes written; they wear out a disk."""

    def has_room(self, size: int) -> bool:
        return self._end + size <= self._room

    @property
    def _end(self) -> int:
        """End of the stored bytes; they are read last in, first out."""
        return max((at + size for at, size in self._held.items()), default=0)

    def write(self, source: Tensor) -> tuple[int, Future]:
        """Start writing uint8 bytes; `source` stays allocated until they are written. EngineError for an earlier
        failure."""
        at, ready = self._end, self._now()
        self._held[at] = len(source)
        self.written += len(source)
        writing = self._thread.submit(self._write, [source], at, ready)
        self._leaving.append((writing, source))
        self.settle(MAX_PENDING_COPIES)
        return at, writing

    def settle(self, under_way: int = 0) -> None:
        """Wait for all but `under_way` pending writes. EngineError if a write failed."""
        while len(self._leaving) > under_way:
            writing, _ = self._leaving.popleft()
            writing.result()

    def read(self, key: tuple[int, Future], target: Tensor) -> Wait:
        """Start reading written bytes into uint8 `target` on the device."""
        return self._thread.submit(self._read, [target], key[0], self._now(), key[1]).result

    def free(self, key: tuple[int, Future]) -> None:
        """Free stored bytes and truncate the file to the rest."""
        at, writing = key
        if not writing.done():  # of an aborted pass
            self._thread.submit(int).result()
        del self._held[at]
        os.ftruncate(self._file.fileno(), self._end)

    def _now(self) -> Any:
        """Return an event after the work queued on the compute stream so far; None on CPUs."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def _write(self, given: list[Tensor], at: int, ready: Any) -> None:
        source = given.pop()  # popped, as the executor keeps arguments alive after the result
        size = len(source)
        try:
            for start, part in self._parts(source):
                if self._stream is not None:
                    part = self._through(self._bounce[: len(part)], part, ready)
                bytes_, written = memoryview(part.numpy()), 0
                while written < len(bytes_):
                    written += os.pwrite(self._file.fileno(), bytes_[written:], at + start + written)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise EngineError(
                f"{size:,} bytes of activations could not be written below {self._folder} ({error.strerror}): {at:,} "
                f"bytes are stored and {free:,} are free. Free disk space, set trainer.default_local_dir to a larger "
                "disk, or lower model.activation_disk_mb (0: recompute instead)."
            ) from error

    def _read(self, given: list[Tensor], at: int, ready: Any, writing: Future) -> None:
        target = given.pop()
        writing.result()
        for start, part in self._parts(target):
            host = part if self._stream is None else self._bounce[: len(part)]
            bytes_, found = memoryview(host.numpy()), 0
            while found < len(bytes_):
                count = os.preadv(self._file.fileno(), [bytes_[found:]], at + start + found)
                if not count:
                    raise EngineError(
                        f"The file of activations below {self._folder} ends before byte {at + start + found:,}"
                    )
                found += count
            if self._stream is not None:
                self._through(part, host, ready)

    def _parts(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        step = PROBE_BYTES if self._stream is not None else max(1, len(whole))
        return [(start, whole[start : start + step]) for start in range(0, len(whole), step)]

    def _through(self, target: Tensor, source: Tensor, ready: Any) -> Tensor:
        """Copy between device and pinned memory after the event `ready`, and wait for the copy."""
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return target


def measure_speed(store: HostMemory | Disk, room: int, device: str) -> float:
    """Return the measured bytes per second, averaged over both directions."""
    probe, seconds = torch.ones(min(PROBE_BYTES, room // 2), dtype=torch.uint8, device=device), []
    for _ in range(2):  # the first run allocates memory
        began = time.perf_counter()
        key = store.write(probe)
        store.read(key, torch.empty_like(probe))()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 2)
        store.free(key)
    return len(probe) / min(seconds)
