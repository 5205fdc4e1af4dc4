"""What ZeRO's ranks exchange: a plan takes it over its links (`costs`), a calibration finds it in a run (`features`).

Role: pure functions of a configuration and a model's shape. ZeRO 0 all-reduces gradients once a step, which is a
scatter and a gather; 1 gathers weights besides; 2 all-reduces in each micro-batch; 3 scatters there, and gathers all
weights forward and backward (Rajbhandari et al. 2020, arXiv 1910.02054), for each module by itself, as DeepSpeed 0.19
does at a `stage3_param_persistence_threshold` of 0. Under 1 and 2 a scatter would do, but DeepSpeed 0.19 sums all
ranks' parts in one all-reduce (`use_multi_rank_bucket_allreduce`, which is on unless a configuration turns it off).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse.config.schema import Config
from rlfuse.planning.memory import ITEM
from rlfuse.planning.model_sizes import Shape


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-gathers and reduce-scatters among all ranks."""

    bytes: float = 0.0
    """Of whole tensors, each as often as it is gathered or scattered."""
    modules: int = 0
    """That are gathered or scattered by themselves."""


def of_pass(config: Config, shape: Shape) -> Exchange:
    """Of a micro-batch without gradients."""
    if config.actor.zero_stage < 3:
        return Exchange()
    return Exchange(shape.parameters * ITEM[config.model.dtype], shape.modules)


def of_gradients(config: Config, shape: Shape) -> Exchange:
    """Of a micro-batch's forward and backward pass."""
    zero, sums = config.actor.zero_stage, shape.parameters * gradient_item(config)
    if zero < 3:
        return Exchange(2 * sums if zero == 2 else 0.0)
    gathers, each = 3 if config.model.enable_gradient_checkpointing else 2, of_pass(config, shape)
    return Exchange(gathers * each.bytes + sums, (gathers + 1) * each.modules)


def of_step(config: Config, shape: Shape) -> Exchange:
    """Of an optimizer step."""
    held = held_of(config, shape)
    weights, sums = held * ITEM[config.model.dtype], held * gradient_item(config)
    return Exchange({0: 2 * sums, 1: 2 * sums + weights, 2: weights, 3: 0.0}[config.actor.zero_stage])


def held_of(config: Config, shape: Shape) -> float:
    """Parameters of a rank: of its share of every layer, and of what is whole on each; all stages together."""
    return shape.parameters - sum(shape.layers) * (1 - 1 / config.training.tensor_model_parallel_size)


def gradient_item(config: Config) -> int:
    """Bytes of a number of a sum."""
    return max(ITEM[config.model.dtype], ITEM[config.actor.grad_accum_dtype])
