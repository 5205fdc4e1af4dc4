"""Communication and local copies of ranks that shard a model's states, as in DeepSpeed 0.19.

Whole states: gradients are all-reduced once a step. Divided optimizers also gather weights, divided gradients are
all-reduced in each micro-batch, divided weights scatter gradients there and are gathered forward and backward (ZeRO,
arXiv 1910.02054). gloo has no reduce-scatter: it sums a copy of everything on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse.config.schema import Config
from rlfuse.engines.deepspeed.memory import REDUCE_BUCKET_ELEMENTS
from rlfuse.engines.memory.model_memory import ITEM, MAX_CACHED_BYTES, gradient_item
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.tools.planning.hardware import ADAM_BYTES, Hardware

PREFETCHED = 50_000_000  # parameters that are gathered ahead (stage3_prefetch_bucket_size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank reads and writes of its own memory."""

    in_place: float = 0.0
    copied: float = 0.0  # into new memory, where the device is a host
    host_only: float = 0.0  # likewise, and not at all on GPUs

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.in_place + other.in_place, self.copied + other.copied, self.host_only + other.host_only)

    def seconds(self, hardware: Hardware) -> float:
        copied = self.copied + (self.host_only if hardware.is_host else 0.0)
        return self.in_place / hardware.update_rate + copied / hardware.copy_rate


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-gathers and reduce-scatters among all ranks."""

    bytes: float = 0.0  # of whole tensors, each as often as it is gathered or scattered
    scattered: float = 0.0  # of the bytes those that gloo sums: they go twice as far
    modules: int = 0  # whose weights are gathered, each as often as it is
    messages: int = 0  # in which it gathers and scatters
    copies: Traffic = Traffic()  # of a rank, for these messages

    def sent(self, hardware: Hardware) -> float:
        return self.bytes + (self.scattered if hardware.is_host else 0.0)


def pass_exchange(config: Config, shape: Shape) -> Exchange:
    """Of a micro-batch without gradients."""
    if not config.sharded_weights:
        return Exchange()
    weights, messages = shape.parameters * ITEM[config.model.dtype], _messages(shape, PREFETCHED)
    copies = _written(weights / messages, 2 * weights) + _by_gloo(weights, messages)
    return Exchange(weights, modules=shape.modules, messages=messages, copies=copies)


def gradient_exchange(config: Config, shape: Shape) -> Exchange:
    """Of a micro-batch's forward and backward pass."""
    sums = shape.parameters * gradient_item(config)
    if not config.sharded_weights:
        return Exchange(2 * sums if config.sharded_gradients else 0.0)
    forward, scatters = pass_exchange(config, shape), _messages(shape, REDUCE_BUCKET_ELEMENTS)
    backward = _by_gloo(2 * forward.bytes, shape.modules)  # gloo's tensor, and that which it copies into, are new
    return Exchange(
        2 * forward.bytes + sums,
        scattered=sums,
        modules=(2 + config.model.enable_gradient_checkpointing) * shape.modules,
        messages=forward.messages + shape.modules + scatters,
        copies=forward.copies + backward + _by_gloo(sums, scatters),
    )


def step_exchange(config: Config, shape: Shape) -> Exchange:
    """Of an optimizer step."""
    held, stages = parameters_per_rank(config, shape), config.training.pipeline_parallel_size
    weights, sums = held * ITEM[config.model.dtype], held * gradient_item(config)
    gathered = weights if config.sharded_optimizer and not config.sharded_weights else 0.0
    summed = 0.0 if config.sharded_gradients else 2 * sums
    return Exchange(gathered + summed, copies=_by_gloo(gathered / stages, 1))


def gradient_traffic(config: Config, held: float, copies: float) -> Traffic:
    """In a micro-batch, of `held` parameters with gradients, of which there are so many copies."""
    return _handed_over(config, held, copies) if config.sharded_gradients else Traffic()


def step_traffic(config: Config, held: float, copies: float) -> Traffic:
    """In an optimizer step, which is of one flat tensor where optimizers are divided."""
    share, item, weight = held / copies, gradient_item(config), ITEM[config.model.dtype]
    if not config.sharded_optimizer:
        return _handed_over(config, held, copies) + Traffic((ADAM_BYTES + _in_halves(item, weight)) * held)
    step = optimizer_traffic(share, weight) + _written(4 * share, (item + 4) * share)
    return step if config.sharded_gradients else step + _handed_over(config, held, copies)


def optimizer_traffic(share: float, item: int) -> Traffic:
    """Return the traffic of a flat float32 tensor's step, with the gradients' norm in float64; on hosts Adam creates
    two tensors of square roots, on GPUs it is one kernel."""
    roots = 4 * share
    return Traffic(
        (4 + 2 * 8) * share + optimizer_bytes(share, item), host_only=2 * 2 * roots if roots > MAX_CACHED_BYTES else 0.0
    )


def _in_halves(item: int, weight: int) -> int:
    """Return the additional bytes per 16-bit parameter of DeepSpeed's `FP16_UnfusedOptimizer` under ZeRO 0: overflow
    check, float32 gradients, weights copied back."""
    return (2 * item + (item + 4) * (item < 4) + 4 + weight) * (weight < 4)


def optimizer_bytes(share: float, item: int) -> float:
    """Bytes where the optimizer is: gradients' scaling and use, weights to those that models read."""
    return (8 + ADAM_BYTES + 4 + item) * share


def offloaded_gradient_bytes(config: Config, held: float, copies: float) -> float:
    """Return the bytes between a device and its host in a micro-batch under `actor.offload_optimizer`: gradient sums
    that stay on the host travel to the device and back."""
    of_weights = ITEM[config.model.dtype] == gradient_item(config)  # else divided gradients are summed on the device
    on_host = config.sharded_gradients if of_weights else config.sharded_weights
    return 2 * gradient_item(config) * held / copies if config.actor.offload_optimizer and on_host else 0.0


def offloaded_step_bytes(config: Config, held: float, copies: float) -> float:
    """Return the same of a step: a rank's float32 gradients, and its weights back. Sums on the host travel again for
    their norm, which makes up for the first micro-batch, which has none."""
    return (4 + ITEM[config.model.dtype]) * held / copies if config.actor.offload_optimizer else 0.0


def _written(size: float, moved: float) -> Traffic:
    """Return the traffic of creating a tensor, which needs new memory if it is larger than any kept."""
    return Traffic(copied=moved) if size > MAX_CACHED_BYTES else Traffic(moved)


def _messages(shape: Shape, together: int) -> int:
    return min(shape.modules, -(-shape.parameters // together))


def _by_gloo(size: float, messages: int) -> Traffic:
    """Return the bytes that gloo copies for so many messages."""
    return Traffic(host_only=2 * size if size / messages > MAX_CACHED_BYTES else 0.0)


def _handed_over(config: Config, held: float, copies: float) -> Traffic:
    """Return the traffic of reducing gradients over ranks and keeping this rank's part."""
    item, share = gradient_item(config), held / copies
    flat = _written(item * held, 2 * item * held)
    if not config.sharded_optimizer:  # scaled by the count and by the ranks, copied back; their norm, clipped
        return flat + Traffic((2 * 2 + 2 + 1 + 2) * item * held)
    if config.sharded_weights:  # bucket and share have room of their own, which stays
        return flat + Traffic((2 + 2) * item * held + 2 * item * share)
    bucket = Traffic(2 * item * held, 2 * item * held)  # of a size of its own, divided
    kept = _written(item * share, 2 * item * share)
    return bucket + kept + (flat + Traffic(2 * item * share) if copies > 1 else Traffic())


def parameters_per_rank(config: Config, shape: Shape) -> float:
    """Parameters of a rank: of its share of every layer, and of what is whole on each; all stages together."""
    return shape.parameters - sum(shape.layers) * (1 - 1 / config.training.tensor_model_parallel_size)
