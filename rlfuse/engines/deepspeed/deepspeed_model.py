"""A `ShardedModel` in a DeepSpeed engine, under `actor.zero_stage`.

Role: trainer ranks with whole models use it; pipelines' ranks use the functions of `optimizer` on stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rlfuse.config.schema import Config
from rlfuse.engines.deepspeed import optimizer
from rlfuse.engines.trainer.saving import Writing

TAG = "deepspeed"


class DeepSpeedModel:
    """`engine`: DeepSpeed's, or the plain module of a frozen model that is whole on each rank."""

    def __init__(self, engine: Any, copies: int):
        self.engine, self._copies = engine, copies
        self.module: PreTrainedModel = getattr(engine, "module", engine)

    @staticmethod
    def loading(config: Config) -> AbstractContextManager[None]:
        return optimizer.sharded_loading(config.actor, config.model.dtype)

    @classmethod
    def trained(
        cls, model: PreTrainedModel, config: Config, lr: float, device: str, grid: Any = None
    ) -> DeepSpeedModel:
        width = config.training.tensor_model_parallel_size
        return cls(optimizer.trainable(model, config.actor, lr, device, grid), dist.get_world_size() // width)

    @classmethod
    def frozen(cls, model: PreTrainedModel, config: Config, device: str) -> DeepSpeedModel:
        return cls(optimizer.freeze(model, config.actor, device), 1)

    @property
    def steps(self) -> int:
        return self.engine.global_steps

    @property
    def optimizer(self) -> Any:
        return getattr(self.engine, "optimizer", None)

    @property
    def basic_optimizer(self) -> Any:
        return getattr(self.engine, "basic_optimizer", None)

    def __call__(self, **inputs: Any) -> Any:
        return self.engine(**inputs)

    def train(self) -> Any:
        return self.engine.train()

    def eval(self) -> Any:
        return self.engine.eval()

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, count: float, lr_factor: float) -> dict[str, float]:
        lr = optimizer.set_lr(self.engine, lr_factor)
        return {"lr": lr, "grad_norm": optimizer.take_step(self.engine, count, self._copies)}

    def nbytes(self, tensor: torch.Tensor) -> int:
        return getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()

    @contextmanager
    def gathered(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
            yield [tensor.detach() for tensor in tensors]

    def not_finite(self) -> str | None:
        return optimizer.not_finite(self.module)

    def save(self, folder: Path, files: Writing) -> None:
        with guarded(self.engine, files):
            self.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        loaded, _ = self.engine.load_checkpoint(str(folder), tag=TAG)
        if loaded is None:
            raise FileNotFoundError(f"{folder}: DeepSpeed found no checkpoint to load")
        optimizer.use_own_settings(self.engine)


@contextmanager
def guarded(engine: deepspeed.DeepSpeedEngine, files: Writing) -> Iterator[None]:
    """Files of its `save_checkpoint` are written through `files`."""
    engine.checkpoint_engine = _Guarded(engine.checkpoint_engine, files)
    engine._copy_recovery_script = lambda *_: None  # of no use beside huggingface/, and a file nobody guards
    try:
        yield
    finally:
        engine.checkpoint_engine = engine.checkpoint_engine.wrapped
        del engine._copy_recovery_script


class _Guarded:
    """DeepSpeed's writer of checkpoint files, as it was but for failures."""

    def __init__(self, wrapped: Any, files: Writing):
        self.wrapped, self._files = wrapped, files

    def save(self, state_dict: Any, path: str) -> None:
        self._files.write(path, lambda: self.wrapped.save(state_dict, path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._files.write(path, lambda: self.wrapped.makedirs(path, exist_ok=exist_ok))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
