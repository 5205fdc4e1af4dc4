"""Which role is on which slot of which node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfuse.config.schema import Config
from rlfuse.planning.activations import parts_on
from rlfuse.planning.model_sizes import Shape


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """One slot, and who is on it."""

    slot: int
    node: int
    engine: str
    trainer: str
    encoders: int = 0  # encoder ranks of a video job


def placements(config: Config, shapes: Mapping[str, Shape]) -> list[SlotPlacement]:
    """One for each slot, in order."""
    width, stages = config.rollout.tensor_model_parallel_size, config.training.pipeline_parallel_size
    shared = config.training.tensor_model_parallel_size
    encoders = (config.video.encoder_ranks or config.slots) if shapes["actor"].tower else 0
    held, found = {role: shape.share(shared) for role, shape in shapes.items()}, []
    for slot in range(config.slots):
        engine, trainer = f"rollout/{slot // width}{_part(slot, width)}", f"trainer/{slot}{_part(slot, shared)}"
        roles = ", ".join(_held(config, role, shape, slot // shared % stages) for role, shape in held.items())
        mine = len(range(slot, encoders, config.slots))
        found.append(SlotPlacement(slot, slot // config.trainer.n_gpus_per_node, engine, f"{trainer}: {roles}", mine))
    return found


def _part(slot: int, width: int) -> str:
    return f" ({slot % width + 1} of {width})" if width > 1 else ""


def _held(config: Config, role: str, shape: Shape, position: int) -> str:
    if config.training.pipeline_parallel_size == 1:
        return role
    held = [part.layers for part in parts_on(config, shape, role, position) if part.layers]
    layers = " and ".join(f"{each.start}-{each.stop - 1}" for each in held)
    return f"{role} layers {layers}" if layers else f"{role} head"
