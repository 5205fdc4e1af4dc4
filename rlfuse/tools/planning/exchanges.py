"""Communication and local copies of ranks that shard a model's states, as in DeepSpeed 0.19.

ZeRO 0 all-reduces gradients once per optimizer step. ZeRO 1 also gathers weights, ZeRO 2 all-reduces gradients in each
micro-batch, ZeRO 3 reduce-scatters them and gathers weights forward and backward (arXiv 1910.02054). gloo has no
reduce-scatter: every rank sums a copy of the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse.config.schema import Config
from rlfuse.engines.deepspeed.memory import REDUCE_BUCKET_ELEMENTS
from rlfuse.engines.memory.model_memory import ITEM, MAX_CACHED_BYTES, gradient_item
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.tools.planning.hardware import ADAM_BYTES, Hardware

PREFETCHED = 50_000_000  # prefetched parameters (stage3_prefetch_bucket_size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank reads and writes in its own memory."""

    in_place: float = 0.0
    copied: float = 0.0  # into newly allocated memory
    host_only: float = 0.0  # into newly allocated memory, on CPU devices only

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.in_place + other.in_place, self.copied + other.copied, self.host_only + other.host_only)

    def seconds(self, hardware: Hardware) -> float:
        copied = self.copied + (self.host_only if hardware.is_host else 0.0)
        return self.in_place / hardware.update_rate + copied / hardware.copy_rate


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-gathers and reduce-scatters among all ranks."""

    bytes: float = 0.0  # whole tensors, counted once per collective
    scattered: float = 0.0  # part of `bytes` in reduce-scatters, which gloo sends twice
    modules: int = 0  # gathered modules, counted once per gather
    messages: int = 0  # number of collectives
    copies: Traffic = Traffic()  # local copies of a rank for these messages

    def sent(self, hardware: Hardware) -> float:
        return self.bytes + (self.scattered if hardware.is_host else 0.0)


def pass_exchange(config: Config, shape: Shape) -> Exchange:
    """Return the communication of a micro-batch without gradients."""
    if not config.sharded_weights:
        return Exchange()
    weights, messages = shape.parameters * ITEM[config.model.dtype], _messages(shape, PREFETCHED)
    copies = _creation_traffic(weights / messages, 2 * weights) + _gloo_copies(weights, messages)
    return Exchange(weights, modules=shape.modules, messages=messages, copies=copies)


def gradient_exchange(config: Config, shape: Shape) -> Exchange:
    """Return the communication of a micro-batch's forward and backward pass."""
    sums = shape.parameters * gradient_item(config)
    if not config.sharded_weights:
        return Exchange(2 * sums if config.sharded_gradients else 0.0)
    forward, scatters = pass_exchange(config, shape), _messages(shape, REDUCE_BUCKET_ELEMENTS)
    backward = _gloo_copies(2 * forward.bytes, shape.modules)  # gloo allocates its tensor and the destination
    return Exchange(
        2 * forward.bytes + sums,
        scattered=sums,
        modules=(2 + config.model.enable_gradient_checkpointing) * shape.modules,
        messages=forward.messages + shape.modules + scatters,
        copies=forward.copies + backward + _gloo_copies(sums, scatters),
    )


def step_exchange(config: Config, shape: Shape) -> Exchange:
    """Return the communication of an optimizer step."""
    held, stages = parameters_per_rank(config, shape), config.training.pipeline_parallel_size
    weights, sums = held * ITEM[config.model.dtype], held * gradient_item(config)
    gathered = weights if config.sharded_optimizer and not config.sharded_weights else 0.0
    summed = 0.0 if config.sharded_gradients else 2 * sums
    return Exchange(gathered + summed, copies=_gloo_copies(gathered / stages, 1))


def gradient_traffic(config: Config, held: float, copies: float) -> Traffic:
    """Return the local traffic of a micro-batch; `held`: parameters of a rank, `copies`: data-parallel copies."""
    return _reduction_traffic(config, held, copies) if config.sharded_gradients else Traffic()


def step_traffic(config: Config, held: float, copies: float) -> Traffic:
    """Return the local traffic of an optimizer step; sharded optimizers use one flat tensor."""
    share, item, weight = held / copies, gradient_item(config), ITEM[config.model.dtype]
    if not config.sharded_optimizer:
        return _reduction_traffic(config, held, copies) + Traffic(
            (ADAM_BYTES + _half_precision_bytes(item, weight)) * held
        )
    step = optimizer_traffic(share, weight) + _creation_traffic(4 * share, (item + 4) * share)
    return step if config.sharded_gradients else step + _reduction_traffic(config, held, copies)


def optimizer_traffic(share: float, item: int) -> Traffic:
    """Return the traffic of an optimizer step on a flat float32 tensor, with the gradient norm in float64. On CPUs Adam
    allocates two tensors of square roots, on GPUs it is one fused kernel."""
    roots = 4 * share
    return Traffic(
        (4 + 2 * 8) * share + optimizer_bytes(share, item), host_only=2 * 2 * roots if roots > MAX_CACHED_BYTES else 0.0
    )


def _half_precision_bytes(item: int, weight: int) -> int:
    """Return the additional bytes per 16-bit parameter of DeepSpeed's `FP16_UnfusedOptimizer` under ZeRO 0 (overflow
    check, float32 gradients, weights copied back)."""
    return (2 * item + (item + 4) * (item < 4) + 4 + weight) * (weight < 4)


def optimizer_bytes(share: float, item: int) -> float:
    """Return the bytes where the optimizer is: scaling and using gradients, copying weights to the model."""
    return (8 + ADAM_BYTES + 4 + item) * share


def offloaded_gradient_bytes(config: Config, held: float, copies: float) -> float:
    """Return the bytes between device and host per micro-batch under `actor.offload_optimizer`: gradient sums kept on
    the host are copied to the device and back."""
    of_weights = ITEM[config.model.dtype] == gradient_item(config)  # else gradients are summed on the device
    on_host = config.sharded_gradients if of_weights else config.sharded_weights
    return 2 * gradient_item(config) * held / copies if config.actor.offload_optimizer and on_host else 0.0


def offloaded_step_bytes(config: Config, held: float, copies: float) -> float:
    """Return the bytes between device and host per optimizer step: a rank's float32 gradients, and its weights back.
    Sums on the host are copied again for their norm; the first micro-batch, which has none to copy, offsets this."""
    return (4 + ITEM[config.model.dtype]) * held / copies if config.actor.offload_optimizer else 0.0


def _creation_traffic(size: float, moved: float) -> Traffic:
    """Return the traffic of creating a tensor, which needs new memory if it exceeds MAX_CACHED_BYTES."""
    return Traffic(copied=moved) if size > MAX_CACHED_BYTES else Traffic(moved)


def _messages(shape: Shape, parameters_per_message: int) -> int:
    return min(shape.modules, -(-shape.parameters // parameters_per_message))


def _gloo_copies(size: float, messages: int) -> Traffic:
    """Return the bytes that gloo copies for `size` bytes in `messages` messages."""
    return Traffic(host_only=2 * size if size / messages > MAX_CACHED_BYTES else 0.0)


def _reduction_traffic(config: Config, held: float, copies: float) -> Traffic:
    """Return the traffic of reducing gradients over ranks and keeping this rank's shard."""
    item, share = gradient_item(config), held / copies
    flat = _creation_traffic(item * held, 2 * item * held)
    if not config.sharded_optimizer:  # scaled by count and by ranks, copied back; norm, clipping
        return flat + Traffic((2 * 2 + 2 + 1 + 2) * item * held)
    if config.sharded_weights:  # bucket and shard are allocated once
        return flat + Traffic((2 + 2) * item * held + 2 * item * share)
    bucket = Traffic(2 * item * held, 2 * item * held)  # newly allocated, then divided
    kept = _creation_traffic(item * share, 2 * item * share)
    return bucket + kept + (flat + Traffic(2 * item * share) if copies > 1 else Traffic())


def parameters_per_rank(config: Config, shape: Shape) -> float:
    """Return the parameters of a rank over all stages: its tensor-parallel shards and all replicated parameters."""
    return shape.parameters - sum(shape.layers) * (1 - 1 / config.training.tensor_model_parallel_size)
