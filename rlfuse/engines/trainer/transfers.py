"""Asynchronous copies of tensors from the host to a GPU, and timing of GPU work.

A copy from pageable memory blocks until the device has finished all earlier work; one from pinned memory is queued, so
the next micro-batch is prepared while the device computes. On CPUs nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlfuse import clock
from rlfuse.events import Span

_ALIGNED = 16
"""Bytes; a multiple of every element size."""


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on the device; a copy to a GPU is queued unless the tensor requires a gradient."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_all(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return host tensors on the device; to a GPU with one copy from one pinned buffer."""
    if torch.device(device).type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return unpack(pack(tensors, pinned=True).to(device, non_blocking=True), tensors)


def pack(tensors: Sequence[Tensor], pinned: bool) -> Tensor:
    """Return the bytes of all tensors in one buffer."""
    buffer = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for place, tensor in zip(unpack(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer that `pack` created from tensors like `like`."""
    found, start = [], 0
    for tensor in like:
        found.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


class DeviceTimes:
    """Sets the times of spans to those of their work on a GPU, which runs later than the code that launches it."""

    def __init__(self, device: str):
        self._on_gpu = device != "cpu"
        self._marks: list[tuple[Span, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, span: Span) -> Iterator[None]:
        """Time the GPU work launched in the body as that of the span."""
        if not self._on_gpu:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._marks.append((span, begin, end))

    def settle(self) -> None:
        """Wait for the work of all spans and set their start and end."""
        if not self._marks:
            return
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        last.synchronize()
        now = clock.now()
        for span, begin, end in self._marks:
            span.start, span.end = (now - each.elapsed_time(last) / 1e3 for each in (begin, end))
        self._marks.clear()
