"""What ZeRO's ranks exchange, and copy in their own memory for that, as DeepSpeed 0.19 does it.

ZeRO 0 all-reduces gradients once a step; 1 also gathers weights; 2 all-reduces in each micro-batch; 3 scatters
gradients there and gathers weights forward and backward (arXiv 1910.02054). gloo has no reduce-scatter: it sums a copy
of everything on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import ITEM
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.trainer.gradient_memory import KEPT, REDUCED
from rlfuse.tools.planning.hardware import ADAM, Hardware

PREFETCHED = 50_000_000  # parameters that ZeRO 3 gathers ahead (stage3_prefetch_bucket_size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank reads and writes of its own memory."""

    in_place: float = 0.0
    copied: float = 0.0  # into new memory, where the device is a host
    on_hosts: float = 0.0  # likewise, and not at all on GPUs

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.in_place + other.in_place, self.copied + other.copied, self.on_hosts + other.on_hosts)

    def seconds(self, hardware: Hardware) -> float:
        copied = self.copied + (self.on_hosts if hardware.is_host else 0.0)
        return self.in_place / hardware.updating + copied / hardware.copying


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-gathers and reduce-scatters among all ranks."""

    bytes: float = 0.0  # of whole tensors, each as often as it is gathered or scattered
    scattered: float = 0.0  # of the bytes those that gloo sums: they go twice as far
    modules: int = 0  # that ZeRO 3 looks after, each as often as it does so
    messages: int = 0  # in which it gathers and scatters
    copies: Traffic = Traffic()  # of a rank, for these messages

    def sent(self, hardware: Hardware) -> float:
        return self.bytes + (self.scattered if hardware.is_host else 0.0)


def of_pass(config: Config, shape: Shape) -> Exchange:
    """Of a micro-batch without gradients."""
    if config.actor.zero_stage < 3:
        return Exchange()
    weights, messages = shape.parameters * ITEM[config.model.dtype], _messages(shape, PREFETCHED)
    copies = _written(weights / messages, 2 * weights) + _by_gloo(weights, messages)
    return Exchange(weights, modules=shape.modules, messages=messages, copies=copies)


def of_gradients(config: Config, shape: Shape) -> Exchange:
    """Of a micro-batch's forward and backward pass."""
    zero, sums = config.actor.zero_stage, shape.parameters * gradient_item(config)
    if zero < 3:
        return Exchange(2 * sums if zero == 2 else 0.0)
    forward, scatters = of_pass(config, shape), _messages(shape, REDUCED)
    backward = _by_gloo(2 * forward.bytes, shape.modules)  # gloo's tensor, and that which it copies into, are new
    return Exchange(
        2 * forward.bytes + sums,
        scattered=sums,
        modules=(2 + config.model.enable_gradient_checkpointing) * shape.modules,
        messages=forward.messages + shape.modules + scatters,
        copies=forward.copies + backward + _by_gloo(sums, scatters),
    )


def of_step(config: Config, shape: Shape) -> Exchange:
    """Of an optimizer step."""
    held, stages = held_of(config, shape), config.training.pipeline_parallel_size
    weights, sums = held * ITEM[config.model.dtype], held * gradient_item(config)
    gathered = weights if config.actor.zero_stage in (1, 2) else 0.0
    summed = 2 * sums if config.actor.zero_stage < 2 else 0.0
    return Exchange(gathered + summed, copies=_by_gloo(gathered / stages, 1))


def moved_in_gradients(config: Config, held: float, copies: float) -> Traffic:
    """In a micro-batch, of `held` parameters with gradients, of which there are so many copies."""
    return _handed_over(config, held, copies) if config.actor.zero_stage > 1 else Traffic()


def moved_in_step(config: Config, held: float, copies: float) -> Traffic:
    """In an optimizer step, which under ZeRO 1 to 3 is of one flat tensor."""
    zero, share, item, weight = config.actor.zero_stage, held / copies, gradient_item(config), ITEM[config.model.dtype]
    if zero == 0:
        return _handed_over(config, held, copies) + Traffic((ADAM + _in_halves(item, weight)) * held)
    step = updated(share, weight) + _written(4 * share, (item + 4) * share)
    return step + _handed_over(config, held, copies) if zero == 1 else step


def updated(share: float, item: int) -> Traffic:
    """Return the traffic of a flat float32 tensor's step, with the gradients' norm in float64; on hosts Adam creates
    two tensors of square roots, on GPUs it is one kernel."""
    roots = 4 * share
    return Traffic((4 + 2 * 8) * share + stepped(share, item), on_hosts=2 * 2 * roots if roots > KEPT else 0.0)


def _in_halves(item: int, weight: int) -> int:
    """Return the additional bytes per 16-bit parameter of DeepSpeed's `FP16_UnfusedOptimizer` under ZeRO 0: overflow
    check, float32 gradients, weights copied back."""
    return (2 * item + (item + 4) * (item < 4) + 4 + weight) * (weight < 4)


def stepped(share: float, item: int) -> float:
    """Bytes where the optimizer is: gradients' scaling and use, weights to those that models read."""
    return (8 + ADAM + 4 + item) * share


def carried_in_gradients(config: Config, held: float, copies: float) -> float:
    """Return the bytes between a device and its host in a micro-batch under `actor.offload_optimizer`: gradient sums
    that stay on the host travel to the device and back."""
    kept_there = 2 if ITEM[config.model.dtype] == gradient_item(config) else 3  # ZeRO 2's own sums stay on the device
    waits = config.actor.offload_optimizer and config.actor.zero_stage >= kept_there
    return 2 * gradient_item(config) * held / copies if waits else 0.0


def carried_in_step(config: Config, held: float, copies: float) -> float:
    """Return the same of a step: a rank's float32 gradients, and its weights back. Sums on the host travel again for
    their norm, which makes up for the first micro-batch, which has none."""
    return (4 + ITEM[config.model.dtype]) * held / copies if config.actor.offload_optimizer else 0.0


def _written(size: float, moved: float) -> Traffic:
    """Return the traffic of creating a tensor, which needs new memory if it is larger than any kept."""
    return Traffic(copied=moved) if size > KEPT else Traffic(moved)


def _messages(shape: Shape, together: int) -> int:
    return min(shape.modules, -(-shape.parameters // together))


def _by_gloo(size: float, messages: int) -> Traffic:
    """Return the bytes that gloo copies for so many messages."""
    return Traffic(on_hosts=2 * size if size / messages > KEPT else 0.0)


def _handed_over(config: Config, held: float, copies: float) -> Traffic:
    """Return the traffic of reducing gradients over ranks and keeping this rank's part."""
    item, share = gradient_item(config), held / copies
    flat = _written(item * held, 2 * item * held)
    if config.actor.zero_stage == 0:  # scaled by the count and by the ranks, copied back; their norm, clipped
        return flat + Traffic((2 * 2 + 2 + 1 + 2) * item * held)
    if config.actor.zero_stage == 3:  # bucket and share have room of their own, which stays
        return flat + Traffic((2 + 2) * item * held + 2 * item * share)
    bucket = Traffic(2 * item * held, 2 * item * held)  # of a size of its own, divided
    kept = _written(item * share, 2 * item * share)
    return bucket + kept + (flat + Traffic(2 * item * share) if copies > 1 else Traffic())


def held_of(config: Config, shape: Shape) -> float:
    """Parameters of a rank: of its share of every layer, and of what is whole on each; all stages together."""
    return shape.parameters - sum(shape.layers) * (1 - 1 / config.training.tensor_model_parallel_size)


def gradient_item(config: Config) -> int:
    """Bytes of a number of a sum."""
    return max(ITEM[config.model.dtype], ITEM[config.actor.grad_accum_dtype])
