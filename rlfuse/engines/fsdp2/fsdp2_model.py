"""A `ShardedModel` under PyTorch's FSDP2 (`fully_shard`): weights, gradients and optimizer state are sharded.

Role: `actor.strategy=fsdp2`. Each decoder layer is gathered for its forward and again for its backward pass, so all
ranks enter every pass together. Parameters are float32 masters; with model.dtype=bfloat16 layers compute in bfloat16
and gradients are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config, OptimConfig
from rlfuse.engines.trainer.sharded_model import mixed
from rlfuse.engines.trainer.state_files import MOMENTS, WEIGHT, Part, SavedState
from rlfuse.engines.trainer.tensor_parallel import TensorShares
from rlfuse.errors import EngineError


class Fsdp2Model:
    """`ShardedModel` on FSDP2; `model` is sharded in place."""

    def __init__(self, model: PreTrainedModel, config: Config, device: str):
        if device != "cpu":  # offloading is not tested with its shards
            raise EngineError("actor.strategy=fsdp2 runs on CPUs only. Set actor.strategy=deepspeed")
        self.module = model
        self._clip, self._lr, self.steps = config.actor.grad_clip or math.inf, 0.0, 0
        self.optimizer: torch.optim.Optimizer | None = None
        devices = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.model.dtype), reduce_dtype=torch.float32)
        layers = {*(model._no_split_modules or ())}
        dtypes = {name: each.dtype for name, each in (*model.named_parameters(), *model.named_buffers())}
        for part in [*(each for each in model.modules() if type(each).__name__ in layers), model.float().to(device)]:
            sharded: FSDPModule = fully_shard(part, mesh=devices, mp_policy=policy, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)  # sum over ranks; gloo supports no other reduction
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)  # experts that only some ranks' tokens reach
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._dtypes = {id(tensor): dtypes[name] for name, tensor in tensors}

    @staticmethod
    def load_extensions(config: Config, device: str) -> str | None:
        return None

    @staticmethod
    def join(backend: str, limit: timedelta) -> None: ...

    @staticmethod
    def loading(config: Config) -> AbstractContextManager[None]:
        return nullcontext()

    @classmethod
    def trained(
        cls, model: PreTrainedModel, config: Config, optim: OptimConfig, device: str, mesh: ParallelMesh
    ) -> Fsdp2Model:
        found = cls(model, config, device)
        found._lr, found.optimizer = optim.lr, torch.optim.AdamW(model.parameters(), **optim.adamw)
        return found

    @classmethod
    def frozen(cls, model: PreTrainedModel, config: Config, device: str) -> Fsdp2Model:
        return cls(model.requires_grad_(False), config, device)

    @staticmethod
    def zero(parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data.zero_()

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def train(self) -> Any:
        return self.module.train()

    def eval(self) -> Any:
        return self.module.eval()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, count: float, lr_factor: float) -> dict[str, float]:
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        gradients = [each.grad for each in parameters if each.grad is not None]
        for gradient in gradients:
            gradient.div_(count)
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # a plain tensor without gradients
        self.optimizer.param_groups[0]["lr"] = lr_factor * self._lr
        if math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {"lr": lr_factor * self._lr, "grad_norm": grad_norm}

    def nbytes(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * self._dtypes[id(tensor)].itemsize

    @contextmanager
    def gathered(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
        yield [found.detach().to(self._dtypes[id(each)]) for each, found in zip(tensors, whole, strict=True)]

    def tensors(self) -> Iterable[torch.Tensor]:
        local = [each.to_local() for each in self.module.parameters()]
        return [*self.module.buffers(), *local, *self.step_tensors()]

    def step_tensors(self) -> Iterable[torch.Tensor]:
        states = self.optimizer.state.values() if self.optimizer else ()
        moments = [value for state in states for value in state.values()]
        return [each.to_local() if isinstance(each, DTensor) else each for each in moments]

    @torch.no_grad()
    def mix_into(self, frozen: Fsdp2Model, share: float) -> None:
        weights = dict(self._local())
        for (name, other), parameter in zip(frozen._local(), frozen.module.parameters(), strict=True):
            other.copy_(mixed(weights[name], other, share).to(frozen._dtypes[id(parameter)]))

    def not_finite(self) -> str | None:
        return next((name for name, each in self._local() if not each.isfinite().all()), None)

    def _local(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, each.detach().to_local()) for name, each in self.module.named_parameters())

    def parts(self, shares: TensorShares | None = None) -> Iterator[Part]:
        for name, parameter in self.module.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            fields = {WEIGHT: parameter.detach(), **{key: state[key] for key in MOMENTS if key in state}}
            _, (first, *_) = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = first * math.prod(parameter.shape[1:])  # sharded by rows
            local = {key: value.to_local().view(-1) for key, value in fields.items()}
            if local[WEIGHT].numel():
                yield Part(name, tuple(parameter.shape), start, local, steps=int(state.get("step", 0)))

    def load(self, saved: SavedState, shares: TensorShares | None = None) -> None:
        steps = {name: saved.steps(name) for name, _ in self.module.named_parameters()}
        self.optimizer.state.clear()
        self._make_moments({name for name, count in steps.items() if count})
        for name, parameter in self.module.named_parameters():
            if state := self.optimizer.state.get(parameter):
                state["step"].fill_(steps[name])
        for part in self.parts():
            for field, tensor in part.tensors.items():
                tensor.copy_(saved.read(field, part))
        self.steps = saved.updates

    def _make_moments(self, names: set[str]) -> None:
        """Create the moments of parameters `names` by a step with zero gradients and learning rate."""
        group = self.optimizer.param_groups[0]
        lr, group["lr"] = group["lr"], 0.0
        for name, parameter in self.module.named_parameters():
            parameter.grad = torch.zeros_like(parameter) if name in names else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        group["lr"] = lr
