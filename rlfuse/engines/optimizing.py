"""DeepSpeed engines from our configuration: ZeRO stage, optimizer, schedule, clipping; their step and their moves.

Role: used by a trainer rank. What is DeepSpeed's own way of doing things is here. Between steps an engine holds sums:
gradients that nothing has divided yet. Only `take_step` scales them, so that micro-batches can be accumulated before
anyone knows how many there will be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from rlfuse.config.schema import ActorConfig, OptimConfig


def trainable(
    model: Any, settings: ActorConfig, lr: float, steps: int, device: str, grid: Any = None
) -> deepspeed.DeepSpeedEngine:
    """`model` under AdamW, the learning-rate schedule over `steps` optimizer steps, clipping and ZeRO.

    `grid`: of pipeline ranks; `model` is then this rank's stages, and the clipped norm is that of all stages.
    """
    optimizer = _optimizer(model, settings, lr, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.optim, steps))
    config = _config(settings, model.dtype)
    plain = settings.zero_stage == 0 and model.dtype == torch.float32
    if plain:  # here DeepSpeed clips without telling the norm, so the optimizer's hook does both
        config["gradient_clipping"] = 0.0
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config, mpu=grid)
    if plain:
        limit = settings.grad_clip or math.inf

        def clip(*_: Any) -> None:
            engine._global_grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))

        optimizer.register_step_pre_hook(clip)
    return engine


def freeze(model: PreTrainedModel, settings: ActorConfig, device: str) -> Any:
    """A model for inference: sharded over the ranks under ZeRO-3, whole on each otherwise."""
    model.requires_grad_(False)
    if settings.zero_stage < 3:
        return model.to(device)
    engine, *_ = deepspeed.initialize(model=model, config=_config(settings, model.dtype))
    return engine


def zero_head(model: PreTrainedModel, labels: int = 1) -> None:
    """Values start at 0, so a fresh critic adds no noise to the first advantages. Sharded or not.

    `labels`: outputs of the head, a module beside the body.
    """
    (head,) = (m for m in model.children() if isinstance(m, torch.nn.Linear) and m.out_features == labels)
    with deepspeed.zero.GatheredParameters(list(head.parameters()), modifier_rank=0), torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()


def take_step(engine: deepspeed.DeepSpeedEngine, count: float, world: int) -> float:
    """Update by the gradients that all ranks accumulated, divided by `count`; every rank calls, also one without any.

    Returns the global norm of the divided gradient before clipping. DeepSpeed averages over the `world` ranks that hold
    the same parameters; the factor undoes that.
    """
    factor, stage = world / count, engine.zero_optimization_stage()
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if stage < 2 and (missing := [parameter for parameter in parameters if parameter.grad is None]):
        # Ranks reduce the same tensors: a backward of nothing gives zeros, and DeepSpeed's buffers with them.
        engine.backward(0.0 * sum(parameter.sum() for parameter in missing), scale_wrt_gas=False)
    if stage == 1:
        engine.optimizer.setup_buckets()  # gradients that came without engine.backward find none
    if stage == 0:
        for parameter in parameters:
            parameter.grad.mul_(factor)
        engine.step()
    else:  # what the gradients are divided by in float32, after reduction and before norm and clipping
        engine.optimizer.loss_scale = 1 / factor
        try:
            engine.step()
        finally:
            engine.optimizer.loss_scale = 1.0  # else the next backward would multiply by it
    return float(engine.get_global_grad_norm())


def to_host(model: Any) -> None:
    """Give the device up: what the model keeps there lies in pinned host memory after this. See `_movable`."""
    accelerator = get_accelerator()
    if states := _movable(model):
        model.offload_states(include=states, pin_memory=True)
    _move(model, lambda tensor: accelerator.pin_empty_like(tensor, device="cpu").copy_(tensor, non_blocking=True))
    accelerator.empty_cache()


def to_device(model: Any, device: str) -> None:
    """Undo `to_host`."""
    if _movable(model):
        model.reload_states(non_blocking=True)
    _move(model, lambda tensor: tensor.to(device, non_blocking=True))


def _movable(model: Any) -> list[OffloadStateTypeEnum]:
    """What DeepSpeed moves of a model itself; the rest of it is `_loose`.

    Under ZeRO 2 and 3 gradients that wait for a step stay on the device; under ZeRO 3 so do frozen models, master
    weights and optimizer state (of the latter two DeepSpeed moves only its FusedAdam's). All this ran on CPU hosts,
    where both ends of a move are host memory; it did not run on a GPU.
    """
    kind, stage = OffloadStateTypeEnum, _stage(model)
    if stage == 0 or isinstance(model.optimizer, DeepSpeedZeRoOffload):
        return []
    return [kind.lp_params, kind.contiguous_grad_buffer] if stage == 3 else list(kind)


def _loose(model: Any) -> Iterator[torch.Tensor]:
    module = getattr(model, "module", model)
    yield from module.buffers()
    yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    if _stage(model) == 0:
        yield from module.parameters()
        if module is not model:
            yield from (tensor for group in model.optimizer.param_groups for tensor in group["params"])
            states = [value for state in model.optimizer.state.values() for value in state.values()]
            yield from filter(torch.is_tensor, states)


def _move(model: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for tensor in {id(tensor): tensor for tensor in _loose(model)}.values():  # masters may be the weights themselves
        tensor.data = place(tensor.data)
    get_accelerator().synchronize()


def _stage(model: Any) -> int:
    return model.zero_optimization_stage() if isinstance(model, deepspeed.DeepSpeedEngine) else 0


@contextmanager
def sharded_loading(settings: ActorConfig, device: str) -> AbstractContextManager:
    """Under ZeRO-3 models are sharded while they load, so no rank ever holds a whole one."""
    config = HfDeepSpeedConfig(_config(settings, torch.float32)) if settings.zero_stage == 3 else nullcontext()
    yield config  # transformers keeps a weak reference: alive for the length of the block


def _config(settings: ActorConfig, dtype: torch.dtype) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False}
    if settings.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,  # nominal: micro-batches are ours, and vary
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # step() is the boundary, however many backward() came before
        "gradient_clipping": settings.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 10**9,
    }


def _optimizer(model: Any, settings: ActorConfig, lr: float, device: str) -> torch.optim.Optimizer:
    options = {"lr": lr, "weight_decay": settings.optim.weight_decay}
    if settings.offload_optimizer:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **options)
    return torch.optim.AdamW(model.parameters(), fused=device != "cpu", **options)


def _rate(step: int, optim: OptimConfig, steps: int) -> float:
    """Share of the full learning rate at an optimizer step."""
    if step < optim.lr_warmup_steps:
        return (step + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = (step - optim.lr_warmup_steps) / max(1, steps - optim.lr_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def matmul_rate(dtype: torch.dtype, device: str, size: int = 512, repeats: int = 5) -> float:
    """FLOP/s of square matrix products on this rank, the best of a few: the peak that utilisation is relative to."""
    size = size if device == "cpu" else 8192
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
