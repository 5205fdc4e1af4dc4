"""A `ShardedModel`, also for stages of pipelines, in a DeepSpeed engine under `actor.zero_stage`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from transformers import PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config, OptimConfig
from rlfuse.engines.deepspeed import deepspeed_ops, optimizer, states
from rlfuse.engines.trainer.sharded_model import mixed
from rlfuse.engines.trainer.state_files import Part, SavedState
from rlfuse.engines.trainer.tensor_parallel import TensorShares, share_of


class DeepSpeedModel:
    """`ShardedModel` on DeepSpeed. `engine`: a DeepSpeed engine, or the module of a frozen, unsharded model."""

    def __init__(self, engine: Any, copies: int):
        self.engine, self._copies = engine, copies
        self.module: PreTrainedModel = getattr(engine, "module", engine)

    @staticmethod
    def load_extensions(config: Config, device: str) -> str | None:
        """Load the operations ahead of DeepSpeed, which then finds them loaded."""
        needed = deepspeed_ops.builders(device, config.actor.offload_optimizer)
        builders = [get_accelerator().create_op_builder(name) for name in needed]
        return deepspeed_ops.load(lambda: [each.load() for each in builders]) if builders else None

    @staticmethod
    def join(backend: str, limit: timedelta) -> None:
        deepspeed.init_distributed(backend, timeout=limit, verbose=False)

    @staticmethod
    def loading(config: Config) -> AbstractContextManager[None]:
        return optimizer.sharded_loading(config.actor, config.model.dtype)

    @classmethod
    def trained(
        cls, model: PreTrainedModel, config: Config, optim: OptimConfig, device: str, mesh: ParallelMesh
    ) -> DeepSpeedModel:
        for parameter in model.parameters():
            if getattr(parameter, "is_tied_copy", False):
                parameter.ds_pipe_replicated = True  # not counted in the norm
        return cls(optimizer.trainable(model, config.actor, optim, device, _grid(mesh)), mesh.copies)

    @classmethod
    def frozen(cls, model: PreTrainedModel, config: Config, device: str) -> DeepSpeedModel:
        return cls(optimizer.freeze(model, config.actor, device), 1)

    @staticmethod
    def zero(parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            getattr(parameter, "ds_tensor", parameter).data.zero_()

    @property
    def steps(self) -> int:
        return self.engine.global_steps

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

    def tensors(self) -> Iterable[torch.Tensor]:
        return _reachable([*self.module.buffers(), *self.module.parameters(), getattr(self.engine, "optimizer", None)])

    def step_tensors(self) -> Iterable[torch.Tensor]:
        return _step_tensors(self.engine)

    @torch.no_grad()
    def mix_into(self, frozen: DeepSpeedModel, share: float) -> None:
        weights = dict(self.module.named_parameters())
        for name, parameter in frozen.module.named_parameters():
            own, other = (getattr(each, "ds_tensor", each).data for each in (weights[name], parameter))
            other.copy_(mixed(own, other, share))

    def not_finite(self) -> str | None:
        return optimizer.not_finite(self.module)

    def parts(self, shares: TensorShares | None = None) -> Iterator[Part]:
        return states.parts(self.engine, self._named(), partial(share_of, shares))

    def load(self, saved: SavedState, shares: TensorShares | None = None) -> None:
        states.load(self.engine, self._named(), partial(share_of, shares), saved)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters under the names of the whole model: without the stage index, if it has stages."""
        staged = isinstance(self.module, torch.nn.ModuleDict)
        return [(name.split(".", 1)[1] if staged else name, each) for name, each in self.module.named_parameters()]

    def close(self) -> None:
        self.engine.destroy()


# Cached: models of equal degree share the groups, and every gloo group starts threads.
@cache
def _grid(mesh: ParallelMesh) -> PipelineParallelGrid | None:
    """Return the grid of ranks with parts of a model; sequence-parallel ranks are data-parallel to DeepSpeed."""
    if mesh.pp * mesh.tp == 1:
        return None
    return PipelineParallelGrid(ProcessTopology(["data", "pipe", "model"], [mesh.copies, mesh.pp, mesh.tp]))


def _step_tensors(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that only steps read: masters and moments, except those that share memory with weights."""
    inner, sharded = getattr(engine, "basic_optimizer", None), "fp32_partitioned_groups_flat"
    if inner is None:
        return []
    found = [each for group in inner.param_groups for each in group["params"]]
    found += [*inner.state, *getattr(engine.optimizer, sharded, [])]  # in `inner` only during a step under ZeRO 3
    found += [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    weights = [*engine.module.buffers(), *engine.module.parameters()]
    weights += [each.ds_tensor for each in weights if hasattr(each, "ds_tensor")]
    kept = {each.untyped_storage().data_ptr() for each in weights}
    return [each for each in found if each.untyped_storage().data_ptr() not in kept]


def _reachable(root: Any) -> Iterator[torch.Tensor]:
    """Return all tensors reachable through containers, tensor attributes and optimizer members."""
    seen, waiting = {}, [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept alive, so that its id is not reused
        if isinstance(value, torch.Tensor):
            yield value
            waiting += [value.grad, *vars(value).values()]  # attributes of a sharded parameter include its partition
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | deque):
            waiting += [*value, *getattr(value, "__dict__", {}).values()]
        elif type(value).__module__.startswith(("deepspeed.runtime.", "torch.optim.")):
            waiting += getattr(value, "__dict__", {}).values()
