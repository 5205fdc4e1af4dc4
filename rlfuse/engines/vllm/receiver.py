"""Load weights from shared memory into vLLM: its weight-transfer backend `shm`, registered by importing this module.

    trainer rank 0 --safetensors bucket in /dev/shm--> receive_weights: mmap, load_weights --> layers of the model

Invariants: a bucket is complete before its path arrives and is never rewritten, since tensors may stay mapped until a
later bucket completes their layer; names are the checkpoint's; after a push every layer computes as if the engine had
started with these weights, or the push raises (engines/README.md lists the copies that vLLM keeps).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlfuse.errors import EngineError
from rlfuse.tensor_files import map_tensors


@dataclass
class SharedInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedBucket(WeightTransferUpdateInfo):
    """One bucket: a safetensors file on this host."""

    path: str


class SharedMemoryTransfer(WeightTransferEngine[SharedInit, SharedBucket]):
    """Loads buckets from shared memory."""

    init_info_cls, update_info_cls = SharedInit, SharedBucket

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        # Layer by layer, because processed layers can't take checkpoint tensors: on CPUs the engine has packed its
        # linear weights and freed the originals.
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            for layer in self.model.modules():
                _rebuild_experts(layer)

    def receive_weights(self, update_info: SharedBucket) -> None:
        _check_reached(self.model, self.model.load_weights(map_tensors(update_info.path)) or ())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A head tied to the embedding gets no tensor of its own, and on CPUs it multiplies by what it packed before.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing to release."""


def _check_reached(model: Module, loaded: Iterable[str]) -> None:
    """Raise EngineError if a loaded parameter was written past the loaders that a reload waits for."""
    for name in loaded:
        path, _, parameter = name.rpartition(".")
        try:
            layer = model.get_submodule(path)
            emptied = getattr(layer, parameter).is_meta
        except AttributeError:  # a model's own name for something
            continue
        if emptied and parameter not in {loading for loading, _ in get_layerwise_info(layer).loaded_weights}:
            raise EngineError(
                f"vLLM can't take new weights of a {type(model).__name__}: what is pushed would not reach {name}. "
                "Choose another model (model.path)."
            )


def _rebuild_experts(layer: Module) -> None:
    """Have vLLM build a CPU kernel of experts again: it packs experts only then, and would take new weights for packed
    ones."""
    if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
        layer.quant_method.moe_kernel = None


def unpushed_tensors(model: Module, device: str) -> list[str]:
    """Name the tensors on the device that a push does not restore: neither parameters nor buffers, nor KV caches."""
    kept = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = []
    for path, module in model.named_modules():
        parts = {"": module} | {name: vars(module).get(name) for name in ("impl", "quant_method", "scheme")}
        values = [(f"{path}.{part}.{name}", each) for part in parts for name, each in _attributes(parts[part])]
        here = [(name, each) for name, each in values if each.device.type == device and each.numel()]
        found += [name.replace("..", ".") for name, each in here if each.untyped_storage().data_ptr() not in kept]
    return found


def _attributes(part: Any) -> list[tuple[str, Tensor]]:
    attributes = getattr(part, "__dict__", {}).items()
    return [(name, each) for name, each in attributes if isinstance(each, Tensor) and name != "kv_cache"]


class ReceiverExtension:
    """Mixin by which vLLM imports this module in its workers."""

    def unpushed_tensors(self) -> list[str]:
        """Name the model's tensors that a push does not restore."""
        return unpushed_tensors(self.get_model(), "cuda")


if "shm" not in WeightTransferEngineFactory._registry:  # the registry has no public query and refuses a second entry
    WeightTransferEngineFactory.register_engine("shm", SharedMemoryTransfer)
