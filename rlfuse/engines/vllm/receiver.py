"""Load weights from shared memory into vLLM: its weight-transfer backend `shm`, registered by importing this module.

    trainer rank 0 --safetensors bucket in /dev/shm--> receive_weights: mmap, load_weights --> layers of the model

Invariants: a bucket is complete before its path is sent and is never rewritten, since tensors may stay mapped until a
later bucket completes their layer. Names are those of the checkpoint. After a push every layer computes as if the
engine had started with these weights, or the push raises (engines/README.md lists the copies that vLLM keeps).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlfuse.errors import EngineError
from rlfuse.tensor_files import map_tensors


@dataclass
class SharedInit(WeightTransferInitInfo):
    """Empty: the transfer needs no initialization."""


@dataclass
class SharedBucket(WeightTransferUpdateInfo):
    """A bucket of weights: a safetensors file on this host."""

    path: str


class SharedMemoryTransfer(WeightTransferEngine[SharedInit, SharedBucket]):
    """Weight transfer that loads buckets from shared memory."""

    init_info_cls, update_info_cls = SharedInit, SharedBucket

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        # Layerwise, because processed layers can't load checkpoint tensors: on CPUs vLLM has packed the linear weights
        # and freed the originals.
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            for layer in self.model.modules():
                _rebuild_experts(layer)

    def receive_weights(self, update_info: SharedBucket) -> None:
        _check_reached(self.model, self.model.load_weights(map_tensors(update_info.path)) or ())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A head tied to the embedding receives no tensor, and on CPUs it would keep using its old packed weights.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Do nothing."""


def _check_reached(model: Module, loaded: Iterable[str]) -> None:
    """Raise EngineError if a parameter was loaded without the weight loaders that a layerwise reload waits for."""
    for name in loaded:
        path, _, parameter = name.rpartition(".")
        try:
            layer = model.get_submodule(path)
            is_emptied = getattr(layer, parameter).is_meta
        except AttributeError:  # a name that is no parameter of the model
            continue
        if is_emptied and parameter not in {loading for loading, _ in get_layerwise_info(layer).loaded_weights}:
            raise EngineError(
                f"vLLM can't update the weights of a {type(model).__name__}: new values would not reach {name}. "
                "Choose another model (model.path)."
            )


def _rebuild_experts(layer: Module) -> None:
    """Make vLLM rebuild the CPU kernel of experts: only then it packs them, and it would use new weights as if
    packed."""
    if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
        layer.quant_method.moe_kernel = None


def unpushed_tensors(model: Module, device: str) -> list[str]:
    """Return the names of tensors on the device that a push does not restore: all but parameters, buffers, KV
    caches."""
    restored = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = []
    for path, module in model.named_modules():
        parts = {"": module} | {name: vars(module).get(name) for name in ("impl", "quant_method", "scheme")}
        values = [(f"{path}.{part}.{name}", each) for part in parts for name, each in _attributes(parts[part])]
        here = [(name, each) for name, each in values if each.device.type == device and each.numel()]
        found += [name.replace("..", ".") for name, each in here if each.untyped_storage().data_ptr() not in restored]
    return found


def _attributes(part: Any) -> list[tuple[str, Tensor]]:
    attributes = getattr(part, "__dict__", {}).items()
    return [(name, each) for name, each in attributes if isinstance(each, Tensor) and name != "kv_cache"]


class ReceiverExtension:
    """Worker extension; naming it makes vLLM import this module in its workers."""

    def unpushed_tensors(self) -> list[str]:
        """Return the names of the model's tensors that a push does not restore."""
        return unpushed_tensors(self.get_model(), "cuda")


if "shm" not in WeightTransferEngineFactory._registry:  # the registry has no public query and refuses a second entry
    WeightTransferEngineFactory.register_engine("shm", SharedMemoryTransfer)
