"""DeepSpeed engines from our configuration: ZeRO stage, optimizer, schedule, clipping.

Role: used by a trainer rank while it loads. Everything DeepSpeed-specific that is not a call on an engine is here.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from rlfuse.config.schema import ActorConfig, OptimConfig


def trainable(
    model: PreTrainedModel, settings: ActorConfig, lr: float, steps: int, device: str
) -> deepspeed.DeepSpeedEngine:
    """`model` under AdamW, the learning-rate schedule over `steps` optimizer steps, clipping and ZeRO."""
    optimizer = _optimizer(model, settings, lr, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.optim, steps))
    config = _config(settings, model.dtype)
    plain = settings.zero_stage == 0 and model.dtype == torch.float32
    if plain:  # here DeepSpeed clips without telling the norm, so the optimizer's hook does both
        config["gradient_clipping"] = 0.0
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
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


def zero_value_head(model: PreTrainedModel) -> None:
    """Values start at 0, so a fresh critic adds no noise to the first advantages. Sharded or not."""
    (head,) = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1)
    with deepspeed.zero.GatheredParameters(list(head.parameters()), modifier_rank=0), torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()


def gradient_norm(engine: deepspeed.DeepSpeedEngine) -> float:
    """Global norm before clipping of the step just taken."""
    return float(engine.get_global_grad_norm())


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


def _optimizer(model: PreTrainedModel, settings: ActorConfig, lr: float, device: str) -> torch.optim.Optimizer:
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
