"""Memory off a device in which activations wait: pinned host memory, and a file on a disk.

Role: `activation_offloading` writes and reads back in the order of the backward pass. On CPU hosts only the disk is
another place. Invariants: neither holds more than it has room for; copies are ordered by events; the file has no name,
so it ends with its process, and shrinks as it is read. Waits for copies, with more than AHEAD of them for the oldest.
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
"""Copies under way, either way: what they hold on the device comes on top of a layer's own."""
PIECE_BYTES = 1 << 22
"""Bytes of pinned memory that are handed out at a time: what waits is of any size, and its memory is used again."""
PIECES_PER_ALLOCATION = 16
"""Pieces that are pinned at once, a power of two as torch has it: a call for each would take seconds in all."""
PROBE_BYTES = 1 << 26
"""Bytes of the copy that is timed."""
Wait = Callable[[], None]
"""Returns when a copy is through, as far as what is computed next is concerned."""


class HostMemory:
    """Of the host of a GPU, pinned; bytes are copied on a stream of their own while others compute."""

    def __init__(self, room: int, cuda: bool):
        self._left = self._unmade = room // PIECE_BYTES
        self._cuda = cuda
        self._free: list[Tensor] = []
        self._stream = torch.cuda.Stream() if cuda else None
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self.written = 0
        """Bytes since the start."""

    def has_room(self, size: int) -> bool:
        return _pieces(size) <= self._left

    def write(self, source: Tensor) -> list[Tensor]:
        """Start to copy uint8 bytes of the device; they are kept until they are copied."""
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
        """Let go of what was to be copied, but for the last; its memory is used again only behind the copies."""
        while len(self._leaving) > under_way:
            event, _ = self._leaving.popleft()
            self._after(event)

    def read(self, pieces: list[Tensor], target: Tensor) -> Wait:
        """Start to copy what was written to uint8 bytes on the device."""
        with self._copying():
            for part, piece in zip(target.split(PIECE_BYTES), pieces, strict=True):
                part.copy_(piece[: len(part)], non_blocking=True)
        event = self._event()
        return lambda: self._after(event)

    def free(self, pieces: list[Tensor]) -> None:
        """Later copies into them come behind this one's, on the same stream."""
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
    """A file below `folder`; a thread writes and reads it, from and to a GPU by way of PROBE pinned bytes."""

    def __init__(self, room: int, cuda: bool, folder: Path):
        self._room, self._folder = room, folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, as long as the rank
        except OSError as error:
            raise EngineError(
                f"model.activation_disk_mb: no file for activations can be made below {folder} ({error.strerror}); "
                "give a trainer.default_local_dir that ranks can write to, or 0"
            ) from error
        self._thread = ThreadPoolExecutor(1, "activations")
        self._stream = torch.cuda.Stream() if cuda else None
        self._bounce = pinned(PROBE_BYTES, cuda) if cuda else None
        self._held: dict[int, int] = {}
        self._leaving: deque[tuple[Future, Tensor]] = deque()
        self.written = 0
        """Bytes since the start: disks wear out by them."""

    def has_room(self, size: int) -> bool:
        return self._end + size <= self._room

    @property
    def _end(self) -> int:
        """Of what is held; what goes back first was written last."""
        return max((at + size for at, size in self._held.items()), default=0)

    def write(self, source: Tensor) -> tuple[int, Future]:
        """Start to write uint8 bytes; they are kept until they are written. EngineError for an earlier failure."""
        at, ready = self._end, self._now()
        self._held[at] = len(source)
        self.written += len(source)
        writing = self._thread.submit(self._write, [source], at, ready)
        self._leaving.append((writing, source))
        self.settle(MAX_PENDING_COPIES)
        return at, writing

    def settle(self, under_way: int = 0) -> None:
        """Wait for what was to be written, but for the last. EngineError where something could not be."""
        while len(self._leaving) > under_way:
            writing, _ = self._leaving.popleft()
            writing.result()

    def read(self, key: tuple[int, Future], target: Tensor) -> Wait:
        """Start to read what was written into uint8 bytes of the device."""
        return self._thread.submit(self._read, [target], key[0], self._now(), key[1]).result

    def free(self, key: tuple[int, Future]) -> None:
        """The file becomes shorter by what is at its end."""
        at, writing = key
        if not writing.done():  # of a pass that was given up
            self._thread.submit(int).result()
        del self._held[at]
        os.ftruncate(self._file.fileno(), self._end)

    def _now(self) -> Any:
        """What the stream that computes has been given so far."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def _write(self, given: list[Tensor], at: int, ready: Any) -> None:
        source = given.pop()  # nobody else's here: the thread keeps what it was given for longer than its answer
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
                f"{size:,} bytes of activations could not be written below {self._folder} ({error.strerror}), where "
                f"{at:,} wait already; {free:,} are free there. Make room, lower model.activation_disk_mb, or give "
                "trainer.default_local_dir on a larger disk; 0 has layers run again instead."
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
                    raise EngineError(f"activations below {self._folder} end before byte {at + start + found:,}")
                found += count
            if self._stream is not None:
                self._through(part, host, ready)

    def _parts(self, whole: Tensor) -> list[tuple[int, Tensor]]:
        step = PROBE_BYTES if self._stream is not None else max(1, len(whole))
        return [(start, whole[start : start + step]) for start in range(0, len(whole), step)]

    def _through(self, target: Tensor, source: Tensor, ready: Any) -> Tensor:
        """Between the device and the pinned bytes, behind what was computed up to `ready`; returns when it is done."""
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return target


def measure_speed(store: HostMemory | Disk, room: int, device: str) -> float:
    """Bytes per second, in the mean of both ways."""
    probe, seconds = torch.ones(min(PROBE_BYTES, room // 2), dtype=torch.uint8, device=device), []
    for _ in range(2):  # the first takes the memory
        began = time.perf_counter()
        key = store.write(probe)
        store.read(key, torch.empty_like(probe))()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 2)
        store.free(key)
    return len(probe) / min(seconds)
