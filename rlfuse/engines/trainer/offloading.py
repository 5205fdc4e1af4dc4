"""Models give their device up for a while: their tensors' memory goes to the host and comes back, in place.

Role: trainer ranks move models between a slot's roles; checkpoints bring them back for as long as they are written.

    to_host      storages on the device --copy, one behind the other--> pieces of pinned host memory; they are emptied
    to_device    the storage gets memory again <--copy-- ; every tensor on it is what it was

Invariants: no tensor is replaced. Flat buffers, the parameters, partitions and fragments that view them, masters that
may be the weights themselves, an optimizer's states and hooks on parameters stay what they are to each other and keep
their device: whatever DeepSpeed keeps where, there is nothing to link again, and a storage that was overlooked costs
memory, nothing else. (DeepSpeed's own `offload_states` unlinks the masters, so that checkpoints of them are zeros, and
leaves the masters and moments of ZeRO 3.) What is away has no memory: reading it kills the process or, in CUDA, its
context, so ranks refuse calls while they are away.
Waits: for all streams of the device, before memory is given up and before it is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from rlfuse.errors import EngineError

_PIECE = 1 << 28
"""Bytes of a piece of pinned memory: a power of two, because torch rounds pinned memory up to the next."""
_away: WeakKeyDictionary[torch.nn.Module, list[tuple[torch.UntypedStorage, list[torch.Tensor]]]] = WeakKeyDictionary()
"""Model -> its storages without memory, with their bytes."""


def to_host(model: torch.nn.Module) -> None:
    """Give up the device memory of a module, or of a DeepSpeed engine with all that its optimizer keeps."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    away = _away.setdefault(model, [])
    storages = _storages(model)
    host = _HostPieces(sum(storage.nbytes() for storage in storages))
    leaving = [(storage, host.copies(_bytes(storage))) for storage in storages]
    accelerator.synchronize()
    for storage, _ in leaving:
        storage.resize_(0)
    away += leaving
    accelerator.empty_cache()


def to_device(model: torch.nn.Module) -> None:
    """Undo `to_host`. Where the device has too little memory the rest stays away, and it can be tried again."""
    away = _away.get(model, [])
    while away:
        storage, copies = away[-1]
        sizes = [copy.numel() for copy in copies]
        storage.resize_(sum(sizes))
        for part, copy in zip(_bytes(storage).split(sizes), copies, strict=True):
            part.copy_(copy, non_blocking=True)
        away.pop()
    get_accelerator().synchronize()


@contextmanager
def on_device(model: torch.nn.Module) -> Iterator[None]:
    """The model is there for the length of the block, and then where it was."""
    moved = bool(_away.get(model))
    to_device(model)
    try:
        yield
    finally:
        if moved:
            to_host(model)


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
                self._room = _pinned(size, source.device.type != "cpu")
            count = min(source.numel(), self._room.numel())
            found.append(self._room[:count].copy_(source[:count], non_blocking=True))
            self._room, source = self._room[count:], source[count:]
            self._left -= count
        return found


def _pinned(size: int, pin: bool) -> torch.Tensor:
    """EngineError where the host has no room, of which CUDA speaks as it does of a full GPU."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        raise EngineError(
            f"{size} bytes more of host memory could not be pinned for what leaves the GPU "
            f"({str(error).splitlines()[0]}). This host has {psutil.virtual_memory().available >> 20} MiB free, a "
            "container in it perhaps less; `rlfuse plan` shows what each slot pins. Raise the limit of the container "
            "or job (docker --memory, Slurm --mem), have fewer slots on a node (trainer.n_gpus_per_node), or cut "
            "models over the ranks (actor.zero_stage=3)."
        ) from error


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(model: Any) -> list[torch.UntypedStorage]:
    """Every storage on the device that the model's tensors view, once. What others manage, as a mapped file, stays."""
    module, device = getattr(model, "module", model), get_accelerator().device_name()
    found = {}
    for tensor in _tensors([*module.buffers(), *module.parameters(), getattr(model, "optimizer", None)]):
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes() and storage.resizable():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _tensors(root: Any) -> Iterator[torch.Tensor]:
    """What is reached from here through containers, attributes of tensors and the parts of optimizers."""
    seen, waiting = {}, [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # alive, or another could get its id
        if isinstance(value, torch.Tensor):
            yield value
            waiting += [value.grad, *vars(value).values()]  # of a sharded parameter its partition
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | deque):
            waiting += [*value, *getattr(value, "__dict__", {}).values()]
        elif type(value).__module__.startswith(("deepspeed.runtime.", "torch.optim.")):
            waiting += getattr(value, "__dict__", {}).values()
