"""The contract of a trainer backend: a model that ranks share.

Role: trainer ranks make their models by `sharded_model(config.actor.strategy)` and know no more of the backend.
Invariant: gradients are sums until `step` divides them once. Every rank calls `step`, `gathered`, `save` and `load`;
`Config.sharded_weights` and `sharded_gradients` say whether passes and backward passes need all ranks, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.backends import BACKENDS, import_object
from rlfuse.engines.trainer.saving import CheckpointWriter
from rlfuse.engines.trainer.tensor_parallel import TensorShares
from rlfuse.errors import EngineError


class ShardedModel(Protocol):
    """A model that is trained, or frozen."""

    module: PreTrainedModel
    """Its parameters under transformers' names; each may be this rank's shard."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken, skipped ones included."""

    @staticmethod
    def load_extensions(config: Config, device: str) -> str | None:
        """Compile and load operations, before ranks meet; return what prevents it for now."""

    @staticmethod
    def join(backend: str, limit: timedelta) -> None:
        """Use torch's default process group, of `gloo` or `nccl`, which the ranks have just made."""

    @staticmethod
    def loading(config: Config) -> AbstractContextManager[None]:
        """Models that are loaded within it may be sharded as they load."""

    @classmethod
    def trained(
        cls, model: PreTrainedModel, config: Config, lr: float, device: str, mesh: ParallelMesh
    ) -> ShardedModel:
        """Return `model`, or this rank's part of it, under AdamW with the full learning rate `lr`."""

    @classmethod
    def frozen(cls, model: PreTrainedModel, config: Config, device: str) -> ShardedModel: ...

    @staticmethod
    def zero(parameters: Iterable[torch.nn.Parameter]) -> None:
        """Set parameters of a model to 0 that was loaded within `loading`."""

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass of `module`."""

    def train(self) -> Any: ...

    def eval(self) -> Any: ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a sum."""

    def step(self, count: float, lr_factor: float) -> dict[str, float]:
        """Update by the ranks' gradients divided by `count`; return `lr` and `grad_norm`, which is before clipping.

        Where the norm is not finite, weights and moments stay as they are on every rank.
        """

    def nbytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the whole tensor as `gathered` returns it."""

    def gathered(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[list[torch.Tensor]]:
        """Parameters or buffers of `module`, whole, in the model's dtype; valid within the block."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all that it holds on its device, the optimizer's tensors with it."""

    def step_tensors(self) -> Iterable[torch.Tensor]:
        """Return those of them that only `step` reads."""

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite on this rank."""

    def save(self, folder: Path, files: CheckpointWriter) -> None:
        """Weights and optimizer state, so that `load` continues bit for bit with as many ranks."""

    def load(self, folder: Path) -> None:
        """What `save` wrote, under this run's learning rate, weight decay and clipping."""


class StagesModel(ShardedModel, Protocol):
    """Additional methods for pipelines: states by parameter name, loadable under any split into stages."""

    def close(self) -> None:
        """Release the model and its optimizer."""

    def save_by_name(
        self, folder: Path, rank: int | None, files: CheckpointWriter, shares: TensorShares | None
    ) -> None:
        """Gather this rank's parameters with their moments; written if `rank` is given, as that rank's file.

        `shares`: of parameters that ranks have shares of; these are written whole.
        """

    def load_by_name(self, folder: Path, shares: TensorShares | None) -> None:
        """Load the states that `save_by_name` wrote for this rank's parameters. FileNotFoundError if there are none."""


def sharded_model(strategy: str) -> type[ShardedModel]:
    """The class that `actor.strategy` selects."""
    return import_object(BACKENDS[strategy].model)


def check_finite(model: str, parameter: str | None) -> None:
    """EngineError if a parameter is named, which is not finite.

    No later step can mend that, and a checkpoint of it would replace one that can be resumed from.
    """
    if parameter is not None:
        raise EngineError(
            f"The {model} is lost, and not saved: its weights are not finite ({parameter}). Resume from the last "
            f"checkpoint with a lower learning rate, a lower actor.grad_clip or model.dtype=float32."
        )
