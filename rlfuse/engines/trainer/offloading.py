"""Models give up their device for a while: their tensors' memory goes to pinned host memory and comes back, in place.

Role: ranks move models between a slot's roles; checkpoints bring them back while they are written. Masters and moments
may leave alone or come back later (actor.optimizer_residency), in a thread and on a stream of their own. Invariants: no
tensor is replaced: storages are emptied and filled, so views, hooks and optimizer states stay linked, and a storage
that was overlooked costs only memory. (DeepSpeed's `offload_states` unlinks masters.) Reading what is away kills the
process or its CUDA context, so ranks refuse calls. One thing moves at a time. Waits: for all streams of the device; for
a fetch, at most the limit given when it began.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch

from rlfuse.cluster.host_memory import free_bytes
from rlfuse.errors import EngineError

_PIECE = 1 << 28
"""Bytes of a piece of pinned memory: a power of two, because torch rounds pinned memory up to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class _OffloadedStorage:
    """A storage without memory, and its bytes."""

    storage: torch.UntypedStorage
    copies: list[torch.Tensor]
    of_optimizer: bool
    """Only steps read it."""

    @property
    def size(self) -> int:
        return sum(copy.numel() for copy in self.copies)


@dataclass(frozen=True, slots=True)
class _Fetch:
    done: Future
    limit_s: float


_offloaded: WeakKeyDictionary[torch.nn.Module, list[_OffloadedStorage]] = WeakKeyDictionary()
_fetches: WeakKeyDictionary[torch.nn.Module, _Fetch] = WeakKeyDictionary()
_fetching = ThreadPoolExecutor(1, "optimizer")
_moving = threading.RLock()
_pinning: threading.Thread | None = None


def to_host(model: torch.nn.Module, optimizer_alone: bool = False) -> None:
    """Give up the device memory of a module, or of a `ShardedModel` with all that its optimizer keeps.

    `optimizer_alone`: only of what its steps alone read.
    """
    with _moving:
        _wait_for_fetch(model)
        optimizer_addresses = _of_optimizer(model)
        _move_to_host(
            model,
            [each for each in _storages(model) if each.data_ptr() in optimizer_addresses or not optimizer_alone],
            optimizer_addresses,
        )


def to_device(model: torch.nn.Module, optimizer: bool = True) -> None:
    """Undo `to_host`; `optimizer`: also for what only steps read, which a fetch may bring already.

    Where the device has too little memory the rest stays away, and it can be tried again.
    """
    with _moving:
        _wait_for_fetch(model)
        offloaded = _offloaded.get(model, [])
        for each in [each for each in reversed(offloaded) if optimizer or not each.of_optimizer]:
            each.storage.resize_(each.size)
            _copy_back(each)
            offloaded.remove(each)
        _synchronize()


def fetch_optimizer(model: torch.nn.Module, limit_s: float) -> None:
    """Begin to bring back what only steps read; a move that waits for it gives up after `limit_s`.

    Nothing begins where it is there or coming, where the weights are away, or while something moves.
    """
    if not _moving.acquire(blocking=False):
        return
    try:
        offloaded = _offloaded.get(model)
        if offloaded and model not in _fetches and all(each.of_optimizer for each in offloaded):
            _fetches[model] = _Fetch(_fetching.submit(_load_back, offloaded), limit_s)
    finally:
        _moving.release()


def offloaded_bytes(model: torch.nn.Module) -> int:
    """Of what is on the host, or on its way from there."""
    return sum(each.size for each in _offloaded.get(model, []))


def release_cached(most: int) -> None:
    """Give the device memory back that the allocator holds unused, all of it, where that is more than `most` bytes.

    To allocate it again takes longer than to use it again, so it stays where the engine has room without it.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > most:
        torch.cuda.empty_cache()


def start_pinning(size: int) -> None:
    """Begin to register host memory for `size` bytes that will leave the device; to do so while they leave takes long.

    torch keeps the pieces and hands them out in `to_host`. Nothing begins where that is under way or done.
    """
    global _pinning
    with _moving:
        if size > 0 and _pinning is None and free_bytes() > size:  # else the system could end this process for it
            _pinning = threading.Thread(target=_pin, args=(size,), daemon=True)
            _pinning.start()


def _pin(size: int) -> None:
    with suppress(EngineError):  # `to_host` reports a host without room, if it comes to that
        pieces = [pinned(_PIECE, pin=True) for _ in range(0, size, _PIECE)]
        del pieces


@contextmanager
def on_device(model: torch.nn.Module, optimizer: bool = True) -> Iterator[None]:
    """The model is there for the length of the block, and then what was away is away again.

    `optimizer`: also what only steps read, which else stays where it is.
    """
    with _moving:
        _wait_for_fetch(model)
        left = [each.storage for each in _offloaded.get(model, []) if optimizer or not each.of_optimizer]
        to_device(model, optimizer)
    try:
        yield
    finally:
        if left:
            with _moving:
                _move_to_host(model, left, _of_optimizer(model))


def _move_to_host(model: torch.nn.Module, storages: list[torch.UntypedStorage], optimizer_addresses: set[int]) -> None:
    _synchronize()
    storages = sorted(
        storages, key=lambda each: each.data_ptr() in optimizer_addresses
    )  # what comes back later shares no piece
    host = _HostPieces(sum(storage.nbytes() for storage in storages))
    leaving = [
        _OffloadedStorage(each, host.copies(_bytes(each)), each.data_ptr() in optimizer_addresses) for each in storages
    ]
    _synchronize()
    for each in leaving:
        each.storage.resize_(0)
    _offloaded.setdefault(model, []).extend(leaving)


def _load_back(offloaded: list[_OffloadedStorage]) -> None:
    """In a thread: until all of it is there, or none. On GPUs memory is taken from where the computing stream takes its
    own, and written behind what that was given so far, which may still use it."""
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    try:
        for each in offloaded:
            each.storage.resize_(each.size)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for each in offloaded:
                _copy_back(each)
        if stream is not None:
            stream.synchronize()
    except BaseException:
        for each in offloaded:
            each.storage.resize_(0)
        raise
    offloaded.clear()


def _copy_back(each: _OffloadedStorage) -> None:
    sizes = [copy.numel() for copy in each.copies]
    for part, copy in zip(_bytes(each.storage).split(sizes), each.copies, strict=True):
        part.copy_(copy, non_blocking=True)


def _wait_for_fetch(model: torch.nn.Module) -> None:
    """Nothing of the model is on its way. EngineError where that takes too long; without room the rest stays away."""
    if (fetch := _fetches.pop(model, None)) is None:
        return
    try:
        fetch.done.result(fetch.limit_s)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except TimeoutError:
        raise EngineError(
            f"waited {fetch.limit_s:g} s for {offloaded_bytes(model):,} bytes of an optimizer's masters and moments, which "
            "were to come from host memory to the device while gradients were computed. Its host copies too slowly, "
            "or not at all; actor.optimizer_residency=training has them come with the weights."
        ) from None


class _HostPieces:
    """Room for `total` bytes that leave the device, in pieces that many storages share."""

    def __init__(self, total: int):
        self._left, self._room = total, torch.empty(0, dtype=torch.uint8)

    def copies(self, source: torch.Tensor) -> list[torch.Tensor]:
        """uint8: what `source`, uint8 too, has, cut where a piece is full."""
        found = []
        while source.numel():
            if not self._room.numel():
                size = min(_PIECE, 1 << (self._left - 1).bit_length())
                self._room = pinned(size, source.device.type != "cpu")
            count = min(source.numel(), self._room.numel())
            found.append(self._room[:count].copy_(source[:count], non_blocking=True))
            self._room, source = self._room[count:], source[count:]
            self._left -= count
        return found


def pinned(size: int, pin: bool) -> torch.Tensor:
    """EngineError where the host has no room, of which CUDA speaks as it does of a full GPU."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        raise EngineError(
            f"{size} bytes more of host memory could not be pinned for what leaves the GPU "
            f"({str(error).splitlines()[0]}). This host has {psutil.virtual_memory().available >> 20} MiB free, a "
            "container in it perhaps less; `rlfuse plan` shows what each slot pins. Raise the limit of the container "
            "or job (docker --memory, Slurm --mem), or have fewer slots on a node (trainer.n_gpus_per_node)."
        ) from error


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_optimizer(model: Any) -> set[int]:
    """Addresses of what only steps read."""
    return {*_addresses(model.step_tensors())} if hasattr(model, "step_tensors") else set()


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage().data_ptr() for tensor in tensors)


def _storages(model: Any) -> list[torch.UntypedStorage]:
    """Every storage on the device that the model's tensors view, once. What others manage, as a mapped file, stays."""
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    for tensor in model.tensors() if hasattr(model, "tensors") else [*model.buffers(), *model.parameters()]:
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes() and storage.resizable():
            found[storage.data_ptr()] = storage
    return list(found.values())
