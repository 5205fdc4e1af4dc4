"""Protocol of a trainer backend: a model sharded over ranks, created with `sharded_model(config.actor.strategy)`.

Gradients are sums until `step` divides them once. Every rank calls `step`, `gathered` and `load`;
`Config.sharded_weights` and `sharded_gradients` say whether passes and backward passes are collective, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol, Self

import torch
from transformers import PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config, OptimConfig
from rlfuse.engines.trainer.backends import BACKENDS, import_object
from rlfuse.engines.trainer.state_files import Part, SavedState
from rlfuse.engines.trainer.tensor_parallel import TensorShares
from rlfuse.errors import EngineError


class ShardedModel(Protocol):
    """Trained or frozen model of a backend."""

    module: PreTrainedModel
    """Module with transformers' parameter names; each parameter may be this rank's shard."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken, skipped ones included."""

    @staticmethod
    def load_extensions(config: Config, device: str) -> str | None:
        """Compile and load operations before ranks join; return the reason if this has to be retried."""

    @staticmethod
    def join(backend: str, limit: timedelta) -> None:
        """Set up the backend after torch's default process group (`gloo` or `nccl`) has been initialised."""

    @staticmethod
    def loading(config: Config) -> AbstractContextManager[None]:
        """Return a context in which models may be sharded while they load."""

    @classmethod
    def trained(
        cls, model: PreTrainedModel, config: Config, optim: OptimConfig, device: str, mesh: ParallelMesh
    ) -> ShardedModel:
        """Return `model`, or this rank's part of it, with AdamW at the full learning rate of `optim`."""

    @classmethod
    def frozen(cls, model: PreTrainedModel, config: Config, device: str) -> ShardedModel: ...

    @staticmethod
    def zero(parameters: Iterable[torch.nn.Parameter]) -> None:
        """Set parameters of a model loaded within `loading` to 0."""

    def __call__(self, **inputs: Any) -> Any:
        """Run a forward pass of `module`."""

    def train(self) -> Any: ...

    def eval(self) -> Any: ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a summed loss."""

    def step(self, count: float, lr_factor: float) -> dict[str, float]:
        """Update with the ranks' summed gradients divided by `count`; return `lr` and the unclipped `grad_norm`.

        If the norm is not finite, weights and moments stay unchanged on every rank.
        """

    def nbytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the unsharded tensor that `gathered` returns."""

    def gathered(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[list[torch.Tensor]]:
        """Gather parameters or buffers of `module`, unsharded, in the model's dtype; valid within the block."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all tensors on its device, including those of the optimizer."""

    def step_tensors(self) -> Iterable[torch.Tensor]:
        """Return those of `tensors` that only `step` reads."""

    def mix_into(self, frozen: Self, share: float) -> None:
        """Set the weights of `frozen` to share * this model's + (1 - share) * its previous ones, in the model's dtype.

        Both have the same parameters, sharded in the same way.
        """

    def not_finite(self) -> str | None:
        """Return the name of a parameter that is not finite on this rank, or None."""

    def parts(self, shares: TensorShares | None = None) -> Iterator[Part]:
        """Yield the parts of trained parameters and moments that this rank holds, as views.

        `shares`: group of ranks with shares of parameters.
        """

    def load(self, saved: SavedState, shares: TensorShares | None = None) -> None:
        """Load a saved state; the settings of the optimizer are those of this run. Every rank calls."""


class StagesModel(ShardedModel, Protocol):
    """A model whose pipeline stages are on several ranks."""

    def close(self) -> None:
        """Release the model and its optimizer."""


def sharded_model(strategy: str) -> type[ShardedModel]:
    """Return the class that `actor.strategy` selects."""
    return import_object(BACKENDS[strategy].model)


def mixed(own: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
    """Return `share` * `own` + (1 - `share`) * `other`, float32."""
    return torch.lerp(other.float(), own.float(), share)


def check_finite(model: str, parameter: str | None) -> None:
    """Raise EngineError if `parameter` names a non-finite one.

    Later steps cannot repair it, and its checkpoint would replace one that can be resumed from.
    """
    if parameter is not None:
        raise EngineError(
            f"The {model} is not saved, as its weights are not finite ({parameter}). Resume from the last "
            f"checkpoint with a lower learning rate, a lower actor.grad_clip or model.dtype=float32."
        )
