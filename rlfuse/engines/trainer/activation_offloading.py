"""Offloading of activations of long micro-batches to host memory or disk, or their recomputation.

Role: a trainer rank runs forward passes with gradients in `RankActivations.offloaded`; autograd's saved tensors are
moved to a tier and prefetched in the backward pass. `activation_placement` decides, `activation_stores` stores the
bytes. Invariants: gradients are bitwise equal to those without offloading. Parameters, small storages and tensors saved
by embedding, head and loss stay on the device. Ranks that communicate while a layer is recomputed use the same
placement, for the maximum of their sizes. A layer's size is measured on the last layer, which stays on the device; in
the first micro-batch layers are recomputed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlfuse.cluster.host_memory import free_bytes
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.activation_placement import Layer, Place, Placement, TierCapacity, place_activations
from rlfuse.engines.trainer.activation_stores import MAX_PENDING_COPIES, Disk, HostMemory, Wait, measure_speed
from rlfuse.engines.trainer.cost_measurement import matmul_rate
from rlfuse.engines.trainer.model_inputs import Batch
from rlfuse.engines.trainer.sharded_model import ShardedModel
from rlfuse.errors import EngineError
from rlfuse.events import Span

MIB, GIB = 1 << 20, 1 << 30
TIER_NAMES = {Place.HOST: "host memory", Place.DISK: "disk"}
LAYER_EFFICIENCY = 0.5
"""Fraction of the rate of large matrix products that layers reach."""
MIN_STORAGE_BYTES = 1 << 20
"""Minimum bytes of a storage that is offloaded."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for the activations of a rank's models, of one model at a time."""

    device: float
    """Bytes of activations that may stay on the device."""
    tiers: Mapping[Place, TierCapacity]
    stores: Mapping[Place, HostMemory | Disk]


class RankActivations:
    """Activation offloading of all models that a rank trains; all ranks create it at the same time."""

    def __init__(self, config: Config, models: Mapping[str, ShardedModel], device: str):
        self._sync_placement, recompute_all = config.sharded_weights, config.model.enable_gradient_checkpointing
        self._budget = _budget(config, device)
        flops = LAYER_EFFICIENCY * matmul_rate(getattr(torch, config.model.dtype), device)
        self._models = {
            name: ActivationOffloading(each.module, self._budget, flops, recompute_all, each.nbytes)
            for name, each in models.items()
        }

    @contextmanager
    def offloaded(self, name: str, batch: Batch, span: Span) -> Iterator[None]:
        """Offload activations of a forward pass in the block; `span` gets the number of layers per place, and bytes."""
        model, part = self._models[name], batch.part.group if batch.part else None
        before = {place: store.written for place, store in self._budget.stores.items()}
        with model.offloaded(batch, dist.group.WORLD if self._sync_placement else part):
            yield
        counts = Counter(model.places.layers)
        span.attributes |= {f"layers_{place}": counts[place] for place in Place if place in counts}
        for place, store in self._budget.stores.items():
            span.attributes[f"{place}_bytes"] = store.written - before[place]

    def __str__(self) -> str:
        """Return a line for the log with the capacity and measured speed of each tier."""
        tiers = [
            f"{room.bytes / GIB:.1f} GiB of {TIER_NAMES[place]} at {room.bytes_per_s / GIB:.1f} GiB/s"
            for place, room in self._budget.tiers.items()
        ]
        places = ", ".join([f"{self._budget.device / GIB:.1f} GiB of the device", *tiers])
        return f"activation offload, per rank: {places}; the rest is recomputed"


def _budget(config: Config, device: str) -> Budget:
    """Return the budget that all ranks can provide; EngineError if the disk is not writable."""
    model, cuda, stores = config.model, device != "cpu", {}
    host = model.activation_host_mb
    host = free_bytes() // 4 // config.trainer.n_gpus_per_node if host is None else host * MIB
    sizes = {Place.HOST: host if cuda else 0, Place.DISK: model.activation_disk_mb * MIB}
    rooms = {}
    for place, size in sizes.items():
        least = torch.tensor(size, dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        if not (size := int(least)):
            continue
        folder = Path(config.trainer.default_local_dir).absolute()
        stores[place] = HostMemory(size, cuda) if place is Place.HOST else Disk(size, cuda, folder)
        speed = torch.tensor(measure_speed(stores[place], size, device), dtype=torch.float64, device=device)
        dist.all_reduce(speed, dist.ReduceOp.MIN)
        rooms[place] = TierCapacity(size, float(speed))
    return Budget(model.activation_device_mb * MIB, rooms, stores)


class ActivationOffloading:
    """Activation offloading of one model.

    `flops`: FLOP/s of a rank; `recompute_all`: recompute every layer; `nbytes`: returns the unsharded bytes of a
    parameter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: Budget,
        flops: float,
        recompute_all: bool,
        nbytes: Callable[[Tensor], int] = attrgetter("nbytes"),
    ):
        self._layers, text = decoder_layers(model), model.config.get_text_config()
        self._parameters = [list(layer.parameters()) for layer in self._layers]
        self._budget, self._recompute_all = budget, recompute_all
        weights = sum(nbytes(each) for own in self._parameters for each in own) / model.dtype.itemsize
        self._token_s = 2 * weights / len(self._layers) / flops
        self._pair_s = 4 * text.hidden_size / flops
        self._inputs = text.hidden_size * model.dtype.itemsize
        self._activations, self._longest = float("inf"), 0
        self._next, self._stored = 0, weakref.WeakValueDictionary[tuple[int, int, int], _Stored]()
        self._last: weakref.ref[_Stored] | None = None
        self.places = Placement((Place.DEVICE,) * len(self._layers))
        """Placement of the last micro-batch."""
        for layer in self._layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    @contextmanager
    def offloaded(self, batch: Batch, sync_group: dist.ProcessGroup | None) -> Iterator[None]:
        """Offload activations of this batch's forward pass in the block; its backward pass may run at any later time.

        `sync_group`: ranks that recompute layers at the same time; all of them call.
        """
        self.places = self._places(batch, sync_group)
        usual = Place.RECOMPUTE if self._recompute_all else Place.DEVICE
        stays = set(self.places.layers) == {usual} and self.places.inputs is Place.DEVICE
        if stays and (self._recompute_all or self._longest >= _tokens(batch)):
            yield
            return
        self._next, self._last, counter = 0, None, _SizeCounter()
        hooks = [handle for i, layer in enumerate(self._layers) for handle in self._layer_hooks(i, layer, counter)]
        for layer, place in zip(self._layers, self.places.layers, strict=True):
            layer.gradient_checkpointing = place is Place.RECOMPUTE
        try:
            with saved_tensors_hooks(partial(self._pack, counter), self._unpack):
                yield
            self._settle_stores()
        finally:
            for handle in hooks:
                handle.remove()
            for layer in self._layers:
                layer.gradient_checkpointing = self._recompute_all
        if counter.bytes and _tokens(batch) > self._longest:
            self._longest = _tokens(batch)
            self._activations = counter.bytes / self._longest

    def _settle_stores(self) -> None:
        """Free offloaded memory: after the next layer, and before head and loss, which need the most."""
        for store in self._budget.stores.values():
            store.settle()

    def _places(self, batch: Batch, sync_group: dist.ProcessGroup | None) -> Placement:
        tokens = _tokens(batch)
        seconds = self._token_s * tokens + self._pair_s * _pairs(batch)
        layer = [self._activations * tokens, self._inputs * tokens, seconds]
        if sync_group is not None:
            most = torch.tensor(layer, dtype=torch.float64, device=batch.predict.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=sync_group)
            layer = most.tolist()
        return place_activations(
            len(self._layers), Layer(*layer), self._budget.device, self._budget.tiers, self._recompute_all
        )

    def _layer_hooks(self, number: int, layer: nn.Module, counter: _SizeCounter) -> Iterator[Any]:
        """Register hooks by which saved tensors are attributed to layers; of a recomputed layer only its inputs are
        saved."""

        def ended(*_: Any) -> None:
            self._next = number + 1
            if self._next == len(self._layers) or self.places.layers[number] is Place.DEVICE:
                self._settle_stores()

        yield layer.register_forward_hook(ended)
        if number == len(self._layers) - 1:
            yield layer.register_forward_pre_hook(lambda *_: counter.begin())

    def _pack(self, counter: _SizeCounter, tensor: Tensor) -> Any:
        number = self._next
        if number == len(self._layers):
            return tensor.detach()
        storage, place = tensor.untyped_storage(), self.places.layers[number]
        if owners := [p for p in self._parameters[number] if p.untyped_storage().data_ptr() == storage.data_ptr()]:
            return next((p for p in owners if _is_whole(p, tensor)), tensor.detach())  # ZeRO 3 changes its memory
        if number == len(self._layers) - 1:
            counter.add(storage)
        place = self.places.inputs if place is Place.RECOMPUTE else place
        if place is Place.DEVICE or storage.nbytes() < MIN_STORAGE_BYTES or not _is_plain(tensor):
            return tensor.detach()
        stored = self._stored_at(place, tensor, storage)
        return tensor.detach() if stored is None else _View(stored, tensor)

    def _stored_at(self, place: Place, tensor: Tensor, storage: torch.UntypedStorage) -> _Stored | None:
        """Store a tensor's storage at its tier or a slower one; None if there is no capacity."""
        key = (storage.data_ptr(), storage.nbytes(), tensor._version)
        stored = self._stored.get(key)
        if stored is not None and stored.source() is storage:
            return stored
        tiers = [tier for tier in self._budget.stores if tier in (place, Place.DISK)]
        store = next((self._budget.stores[t] for t in tiers if self._budget.stores[t].has_room(key[1])), None)
        if store is None:
            return None
        stored = self._stored[key] = _Stored(store, tensor, storage, self._last)
        self._last = weakref.ref(stored)
        return stored

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _View):
            return packed.tensor()
        return packed.detach()


class _Stored:
    """Offloaded storage, loaded back once."""

    def __init__(
        self,
        store: HostMemory | Disk,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        before: weakref.ref[_Stored] | None,
    ):
        self.source, self._before = weakref.ref(storage), before
        self._store, self._size, self._device = store, storage.nbytes(), tensor.device
        self._back: Tensor | None = None
        self._wait: Wait | None = None
        self._key: Any = None
        self._key = store.write(_bytes(storage))

    def fetch(self) -> None:
        """Start loading it back, unless that has been done."""
        if self._back is None:
            self._back = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._wait = self._store.read(self._key, self._back)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device; prefetch those stored before it, which are needed next."""
        self.fetch()
        if self._wait is not None:
            self._wait()
            self._wait = None
        before = self._before
        for _ in range(MAX_PENDING_COPIES):
            stored = before() if before is not None else None
            if stored is None:
                break
            stored.fetch()
            before = stored._before
        return self._back.untyped_storage()

    def __del__(self) -> None:
        if self._wait is not None:  # of an aborted pass
            self._wait()
        if self._key is not None:
            self._store.free(self._key)


class _View:
    """Placeholder that autograd keeps for an offloaded tensor."""

    def __init__(self, stored: _Stored, tensor: Tensor):
        self._stored, self._dtype = stored, tensor.dtype
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        storage = self._stored.storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)


class _SizeCounter:
    """Counter of the bytes that a layer saves, each storage once."""

    def __init__(self) -> None:
        self.bytes, self._seen = 0, set[int]()

    def begin(self) -> None:
        self.bytes = 0
        self._seen.clear()

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the model's decoder layers. EngineError if transformers cannot recompute them individually."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        layers = list(module) if isinstance(module, nn.ModuleList) else []
        if len(layers) == count and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
            return layers
    raise EngineError(
        f"model.enable_activation_offload=true: a {type(model).__name__} has no {count} layers of type "
        "GradientCheckpointingLayer, which transformers can recompute individually. Set it to false, and "
        "model.enable_gradient_checkpointing=true if memory is short"
    )


def _is_whole(parameter: nn.Parameter, tensor: Tensor) -> bool:
    """Return whether `tensor` is all of `parameter` and not a view of part of it."""
    alike = parameter.data_ptr() == tensor.data_ptr() and parameter.shape == tensor.shape
    return alike and parameter.stride() == tensor.stride() and parameter.dtype == tensor.dtype


def _is_plain(tensor: Tensor) -> bool:
    """Return whether storage, shape and strides define the tensor completely."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_conj()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tokens(batch: Batch) -> int:
    return batch.inputs["input_ids"].numel()


def _pairs(batch: Batch) -> float:
    """Return this rank's share of the token pairs in attention."""
    own = [(each.stop - each.start, each.prefix or (0, 0)) for each in batch.inputs["layout"].segments]
    pairs = sum(size * (size / 2 + stop - start) for size, (start, stop) in own)
    return pairs / (batch.part.degree if batch.part else 1)
