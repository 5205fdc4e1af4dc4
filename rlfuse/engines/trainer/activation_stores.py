"""Store of offloaded activations in pinned host memory.

Role: `activation_offloading` writes, and reads in the order of the backward pass. The store stays within its capacity;
copies are ordered by events. Waits for the oldest copy if more than `MAX_PENDING_COPIES` are pending.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlfuse.engines.trainer.offloading import pinned

MAX_PENDING_COPIES = 2
"""Maximum pending copies per direction; their device memory adds to that of a layer."""
PIECE_BYTES = 1 << 22
"""Bytes of a piece of pinned memory; storages of any size use several, which are reused."""
PIECES_PER_ALLOCATION = 16
"""Pieces pinned in one call, a power of two like torch's allocations; one call per piece would take seconds in
total."""
PROBE_BYTES = 1 << 26
"""Bytes of the timed copy."""
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


def measure_speed(store: HostMemory, room: int, device: str) -> float:
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
