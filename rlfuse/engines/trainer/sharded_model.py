"""The contract of a trainer backend: a model that ranks share, and how `actor.strategy` selects its class.

Role: trainer ranks make their models by `sharded_model(config.actor.strategy)` and know no more of the backend.
Invariant: gradients are sums until `step` divides them once. Every rank calls `step`, `gathered`, `save` and `load`;
`Config.sharded_weights` and `sharded_gradients` say whether passes and backward passes need all ranks, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.saving import Writing
from rlfuse.errors import EngineError

BACKENDS = {
    "deepspeed": "rlfuse.engines.deepspeed.deepspeed_model:DeepSpeedModel",
    "fsdp2": "rlfuse.engines.fsdp2.fsdp2_model:Fsdp2Model",
}
"""`actor.strategy` -> module and class of its `ShardedModel`."""


class ShardedModel(Protocol):
    """A model that is trained, or frozen."""

    module: PreTrainedModel
    """Its parameters under transformers' names; each may be this rank's shard."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken, skipped ones included."""

    @property
    def optimizer(self) -> Any:
        """What holds the optimizer's tensors, for moves between device and host; None if frozen."""

    @staticmethod
    def loading(config: Config) -> AbstractContextManager[None]:
        """Models that are loaded within it may be sharded as they load."""

    @classmethod
    def trained(cls, model: PreTrainedModel, config: Config, lr: float, device: str, grid: Any = None) -> ShardedModel:
        """`model` under AdamW with the full learning rate `lr`. `grid`: of ranks that share its layers."""

    @classmethod
    def frozen(cls, model: PreTrainedModel, config: Config, device: str) -> ShardedModel: ...

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

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite on this rank."""

    def save(self, folder: Path, files: Writing) -> None:
        """Weights and optimizer state, so that `load` continues bit for bit with as many ranks."""

    def load(self, folder: Path) -> None:
        """What `save` wrote, under this run's learning rate, weight decay and clipping."""


def sharded_model(strategy: str) -> type[ShardedModel]:
    """The class that `actor.strategy` selects."""
    module, _, found = BACKENDS[strategy].partition(":")
    return getattr(import_module(module), found)


def check_finite(model: str, parameter: str | None) -> None:
    """EngineError if a parameter is named, which is not finite.

    No later step can mend that, and a checkpoint of it would replace one that can be resumed from.
    """
    if parameter is not None:
        raise EngineError(
            f"The {model} is lost, and not saved: its weights are not finite ({parameter}). Resume from the last "
            f"checkpoint with a lower learning rate, a lower actor.grad_clip or model.dtype=float32."
        )
