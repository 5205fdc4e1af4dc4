"""DeepSpeed engines from our configuration: ZeRO stage, optimizer, clipping, and their step.

Role: used by `DeepSpeedModel`. Between steps an engine accumulates unscaled sums of gradients; only `take_step` scales
them, so micro-batches can be accumulated before their number is known. `memory` has the size of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, is_zero_param
from deepspeed.utils import groups
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from rlfuse.config.schema import ActorConfig, OptimConfig
from rlfuse.engines.deepspeed.memory import REDUCE_BUCKET_ELEMENTS
from rlfuse.engines.trainer.tensor_parallel import is_share


def trainable(
    model: Any, settings: ActorConfig, optim: OptimConfig, device: str, grid: Any = None
) -> deepspeed.DeepSpeedEngine:
    """Return a DeepSpeed engine for `model` with AdamW at the full learning rate (`set_lr`), clipping and ZeRO.

    `grid`: ranks with parts of a model (stages or shares of layers); `model` is then this rank's part, and gradients
    are clipped by the norm over all parts.
    """
    optimizer = _optimizer(model, settings, optim, device)
    config = _config(settings, model.dtype)
    own = settings.zero_stage == 0 and (model.dtype == torch.float32 or grid is not None)
    if own:  # DeepSpeed would not report or check the norm here, or omit parts of the model
        config["gradient_clipping"] = 0.0
    engine = _initialized(model, config, grid, optimizer)
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        _undo_step(engine.optimizer)
    if own:
        _clip_before_steps(engine, optimizer, settings.grad_clip or math.inf, grid)
    if settings.zero_stage < 2 and _sums(settings, model.dtype) != model.dtype:
        _sum_in_float32(engine)
    return engine


def _initialized(
    model: Any, config: dict[str, Any], grid: Any = None, optimizer: Any = None
) -> deepspeed.DeepSpeedEngine:
    groups.mpu = None  # DeepSpeed keeps the grid of the last engine, and applies it to an engine without one
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=grid)[0]


def _undo_step(wrapper: FP16_UnfusedOptimizer) -> None:
    """Undo the initial step with zero gradients of DeepSpeed's bfloat16 optimizer without ZeRO.

    AdamW would count it in its bias corrections, and it has decayed the masters.
    """
    for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            master.data.copy_(weight)
    wrapper.optimizer.state.clear()


def _clip_before_steps(
    engine: deepspeed.DeepSpeedEngine, optimizer: torch.optim.Optimizer, limit: float, grid: Any
) -> None:
    """Clip gradients to norm `limit` before every step, and skip the step if the norm is not finite.

    The norm is over all parts of the model, and stored in `engine.optimizer`: `optimizer` itself or, for other dtypes
    than float32, its wrapper with float32 masters.
    """
    wrapper = engine.optimizer
    stepped = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    first = grid is None or grid.get_model_parallel_rank() == 0  # counts parameters that several ranks replicate
    mine = [each for each, parameter in zip(stepped, trained, strict=True) if first or is_share(parameter)]

    def clip(*_: Any) -> None:
        norm = torch.nn.utils.get_total_norm([each.grad for each in mine if each.grad is not None])
        if grid is not None:
            square = norm.square()
            dist.all_reduce(square, group=grid.get_model_parallel_group())
            norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(stepped, limit, norm)
        wrapper._global_grad_norm = float(norm)
        # DeepSpeed's flag of a skipped step; AdamW ignores parameters without a gradient.
        wrapper.overflow = not math.isfinite(wrapper._global_grad_norm)
        if wrapper.overflow:
            optimizer.zero_grad()

    optimizer.register_step_pre_hook(clip)


def _sum_in_float32(engine: deepspeed.DeepSpeedEngine) -> None:
    """Accumulate float32 gradients for parameters of any dtype under ZeRO 0 and 1, which reduce in the step.

    DeepSpeed's own option rejects stage 0 and permanently keeps another copy of all gradients under stage 1. Autograd
    accumulates in `grad_dtype`, and the optimizer uses the two dtypes set here only for gradients.
    """
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    if engine.zero_optimization_stage() == 1:
        engine.optimizer.dtype = engine.optimizer.gradient_accumulation_dtype = torch.float32


def _sums(settings: ActorConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are summed over micro-batches and ranks."""
    return torch.float32 if settings.grad_accum_dtype == "float32" else dtype


def set_lr(engine: deepspeed.DeepSpeedEngine, factor: float) -> float:
    """Set the learning rate of the next step to `factor` times the full rate, and return it."""
    lr = factor * engine.basic_optimizer.defaults["lr"]
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = lr
    return lr


def freeze(model: PreTrainedModel, settings: ActorConfig, device: str) -> Any:
    """Return a model for inference: sharded over the ranks under ZeRO-3, replicated otherwise."""
    model.requires_grad_(False)
    if settings.zero_stage < 3:
        return model.to(device)
    engine = _initialized(model, _config(settings, model.dtype))
    return engine


def take_step(engine: deepspeed.DeepSpeedEngine, count: float, world: int) -> float:
    """Update with the gradients of all ranks divided by `count`; every rank calls, also one without gradients.

    Returns the global norm of the divided gradient before clipping. If it is not finite, on every rank weights and
    moments stay unchanged and gradients are cleared. DeepSpeed averages over the `world` ranks with the same
    parameters; the factor undoes that.
    """
    factor, stage = world / count, engine.zero_optimization_stage()
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if stage < 2 and (missing := [parameter for parameter in parameters if parameter.grad is None]):
        # Ranks must reduce the same tensors: a backward of zero creates gradients and DeepSpeed's buffers.
        engine.backward(0.0 * sum(parameter.sum() for parameter in missing), scale_wrt_gas=False)
    if stage == 1:
        engine.optimizer.setup_buckets()  # needed by gradients that did not come from engine.backward
    if stage == 0:
        for parameter in parameters:
            parameter.grad.mul_(factor)
        engine.step()
    else:  # divides float32 gradients after reduction, before norm and clipping
        engine.optimizer.loss_scale = 1 / factor
        try:
            engine.step()
        finally:
            engine.optimizer.loss_scale = 1.0  # otherwise the next backward would multiply by it
    if stage == 3:
        _clear_gradients(engine.optimizer)
    return float(engine.get_global_grad_norm())


def _clear_gradients(zero: Any) -> None:
    """Clear the gradients of ZeRO 3, which keeps those of parameters that the next first backward does not reach."""
    zero.grad_partitions_flat_buffer.zero_()


@torch.no_grad()
def not_finite(module: torch.nn.Module) -> str | None:
    """Return the name of a parameter, or shard of one, that is not finite on this rank; else None."""
    for name, parameter in module.named_parameters():
        shard = _without_padding(parameter) if is_zero_param(parameter) else parameter
        if shard.numel() and not all(end.isfinite() for end in shard.aminmax()):  # NaN would be both
            return name
    return None


def _without_padding(parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter under ZeRO 3; DeepSpeed never writes the padding of the last shards."""
    shard = parameter.ds_tensor.view(-1)
    start = dist.get_rank(parameter.ds_process_group) * len(shard)
    return shard[: max(0, parameter.ds_numel - start)]


class _ParameterShards(deepspeed.zero.Init):
    """Context that shards parameters over the ranks as modules are built, in the model's dtype.

    DeepSpeed's class casts every tensor that a module creates, and would round rotary frequencies to bfloat16.
    """

    def __init__(self, **options: Any):
        super().__init__(tensor_overrides=[DeepSpeedTensorOverride.device], **options)

    def _post_init_method(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and not is_zero_param(parameter):
                parameter.data = parameter.data.to(self.dtype)
        super()._post_init_method(module)


@contextmanager
def sharded_loading(settings: ActorConfig, dtype: str) -> Iterator[None]:
    """Shard models while `from_pretrained` loads them under ZeRO 3, so that no rank holds a whole one.

    `dtype`: `model.dtype`.
    """
    if settings.zero_stage < 3:
        yield
        return
    config = HfDeepSpeedConfig(_config(settings, getattr(torch, dtype)))  # transformers keeps a weak reference
    original, deepspeed.zero.Init = deepspeed.zero.Init, _ParameterShards  # transformers uses this name
    try:
        yield
    finally:
        deepspeed.zero.Init = original
        del config


def _config(settings: ActorConfig, dtype: torch.dtype) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
    }
    if settings.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    summed: dict[str, Any] = {}
    if _sums(settings, dtype) != dtype:
        summed["communication_data_type"] = "fp32"
        if settings.zero_stage > 1:  # reduced per micro-batch, so DeepSpeed accumulates
            summed["data_types"] = {"grad_accum_dtype": "fp32"}
    return summed | {
        "train_micro_batch_size_per_gpu": 1,  # nominal: rlfuse forms micro-batches of varying size
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # step() is the boundary for any number of backward()
        "gradient_clipping": settings.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 10**9,
    }


def _optimizer(model: Any, settings: ActorConfig, optim: OptimConfig, device: str) -> torch.optim.Optimizer:
    if settings.offload_optimizer:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **optim.adamw)
    return torch.optim.AdamW(model.parameters(), fused=device != "cpu", **optim.adamw)
