"""Offloading of models to pinned host memory and back, in place.

No tensor is replaced: storages are emptied and refilled, so views, hooks and optimizer states stay linked (DeepSpeed's
`offload_states` unlinks masters). Masters and moments can be offloaded alone or loaded later in a thread
(actor.optimizer_residency). Reading an offloaded tensor kills the process or its CUDA context, so ranks reject such
calls. Only one move runs at a time.
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
"""Bytes of a piece of pinned memory: a power of two, to which torch rounds pinned memory up."""


@dataclass(frozen=True, slots=True, eq=False)
class _OffloadedStorage:
    """Emptied storage and its bytes on the host."""

    storage: torch.UntypedStorage
    copies: list[torch.Tensor]
    of_optimizer: bool
    """True if only optimizer steps read it."""

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
    """Offload a module, or a `ShardedModel` with its optimizer states, to host memory.

    `optimizer_alone`: offload only the tensors that only optimizer steps read.
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
    """Undo `to_host`; `optimizer`: also for the tensors that only optimizer steps read.

    If the device has too little memory, the rest stays offloaded and the call can be repeated.
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
    """Start loading the tensors that only optimizer steps read; a move that waits for it fails after `limit_s`.

    No-op if they are loaded or being loaded, if weights are offloaded, or during another move.
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
    """Return the bytes of `model` that are offloaded or being loaded."""
    return sum(each.size for each in _offloaded.get(model, []))


def release_cached(most: int) -> None:
    """Release all unused cached device memory if it exceeds `most` bytes.

    Allocation is slower than reuse, so memory that the engine does not need stays cached.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > most:
        torch.cuda.empty_cache()


def start_pinning(size: int) -> None:
    """Start pinning host memory for `size` bytes in a thread, as pinning during `to_host` would be slow.

    torch caches the pieces and reuses them in `to_host`. No-op if pinning has been started.
    """
    global _pinning
    with _moving:
        if size > 0 and _pinning is None and free_bytes() > size:  # otherwise the kernel could kill this process
            _pinning = threading.Thread(target=_pin, args=(size,), daemon=True)
            _pinning.start()


def _pin(size: int) -> None:
    with suppress(EngineError):  # `to_host` reports a lack of host memory
        pieces = [pinned(_PIECE, pin=True) for _ in range(0, size, _PIECE)]
        del pieces


@contextmanager
def on_device(model: torch.nn.Module, optimizer: bool = True) -> Iterator[None]:
    """Keep the model on the device within the block, and offload it again if it was.

    `optimizer`: also the tensors that only optimizer steps read.
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
    )  # optimizer tensors share no piece with weights
    host = _HostPieces(sum(storage.nbytes() for storage in storages))
    leaving = [
        _OffloadedStorage(each, host.copies(_bytes(each)), each.data_ptr() in optimizer_addresses) for each in storages
    ]
    _synchronize()
    for each in leaving:
        each.storage.resize_(0)
    _offloaded.setdefault(model, []).extend(leaving)


def _load_back(offloaded: list[_OffloadedStorage]) -> None:
    """Load all of `offloaded`, or nothing on failure; runs in a thread. On GPUs memory comes from the compute stream's
    pool, and is written after the work queued there so far, which may still use it."""
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
    """Wait for a fetch of the model. EngineError after its limit; without device memory the rest stays offloaded."""
    if (fetch := _fetches.pop(model, None)) is None:
        return
    try:
        fetch.done.result(fetch.limit_s)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except TimeoutError:
        raise EngineError(
            f"Loading {offloaded_bytes(model):,} bytes of optimizer masters and moments from host memory took longer "
            f"than {fetch.limit_s:g} s. Set actor.optimizer_residency=training to load them with the weights."
        ) from None


class _HostPieces:
    """Host memory for `total` bytes, in pieces that storages share."""

    def __init__(self, total: int):
        self._left, self._room = total, torch.empty(0, dtype=torch.uint8)

    def copies(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Copy uint8 `source` to the host; return the parts, split at the ends of pieces."""
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
    """Allocate uint8 host memory. EngineError if the host lacks it, which CUDA reports like a full GPU."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        raise EngineError(
            f"{size} bytes of host memory could not be pinned for offloading ({str(error).splitlines()[0]}). "
            f"This host has {psutil.virtual_memory().available >> 20} MiB free, a container possibly less; `rlfuse "
            "plan` shows what each slot pins. Raise the limit of the container or job (docker --memory, Slurm --mem), "
            "or use fewer slots per node (trainer.n_gpus_per_node)."
        ) from error


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_optimizer(model: Any) -> set[int]:
    """Return the addresses of tensors that only optimizer steps read."""
    return {*_addresses(model.step_tensors())} if hasattr(model, "step_tensors") else set()


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage().data_ptr() for tensor in tensors)


def _storages(model: Any) -> list[torch.UntypedStorage]:
    """Return each resizable storage on the device that the model's tensors view; e.g. mapped files are excluded."""
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    for tensor in model.tensors() if hasattr(model, "tensors") else [*model.buffers(), *model.parameters()]:
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes() and storage.resizable():
            found[storage.data_ptr()] = storage
    return list(found.values())
