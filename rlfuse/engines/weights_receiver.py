"""The engine's end of the shared-memory weight transfer: a vLLM weight-transfer backend named `shm`.

Role: imported inside every vLLM worker process, because the engine's `worker_extension_cls` derives from
`ReceiverExtension`; importing registers the backend. The trainer's end is `weights.WeightPush`.

    trainer rank 0 --safetensors bucket in /dev/shm--> receive_weights: mmap, load_weights --> layers of the model

Invariants:
- a bucket is complete before its path arrives here, and is never rewritten: whoever made it only unlinks it, so that
  tensors still mapped (a fused layer waits for parts that come with a later bucket) stay valid;
- names are those of the checkpoint, never vLLM's own; any split of a layer over buckets is allowed.
Waits for nothing: a bucket is loaded in the call that announces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class SharedInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedBucket(WeightTransferUpdateInfo):
    """One bucket, as a safetensors file on this host."""

    path: str


class SharedMemoryTransfer(WeightTransferEngine[SharedInit, SharedBucket]):
    """Loads buckets that lie in shared memory."""

    init_info_cls, update_info_cls = SharedInit, SharedBucket

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        # Layer by layer, because processed layers can't take checkpoint tensors: on CPUs the engine has packed its
        # linear weights and freed the originals.
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedBucket) -> None:
        with safe_open(update_info.path, "pt") as bucket:
            self.model.load_weights((name, bucket.get_tensor(name)) for name in bucket.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A head tied to the embedding gets no tensor of its own, and on CPUs it multiplies by what it packed before.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing to release."""


class ReceiverExtension:
    """Empty mixin: naming it makes vLLM import this module in its workers."""


if "shm" not in WeightTransferEngineFactory._registry:  # the registry has no public query and refuses a second entry
    WeightTransferEngineFactory.register_engine("shm", SharedMemoryTransfer)
