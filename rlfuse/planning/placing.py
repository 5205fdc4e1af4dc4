"""Which role stands on which slot of which node: pure, from the configuration and the models' layers.

Role: shown by `rlfuse plan`; the same rules as `cluster.placement` (bundles fill one node after the other) and
`engines.pipeline.layout` (the critic runs against the actor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfuse.config.schema import Config
from rlfuse.planning.activations import stage_of
from rlfuse.planning.model_sizes import Shape


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """One slot, and who is on it."""

    slot: int
    node: int
    engine: str
    trainer: str
    encoders: int = 0
    """Encoder ranks of a video job."""


def placements(config: Config, shapes: Mapping[str, Shape]) -> list[SlotPlacement]:
    """One for each slot, in order."""
    width, stages = config.rollout.tensor_model_parallel_size, config.training.pipeline_parallel_size
    encoders = (config.video.encoder_ranks or config.slots) if shapes["actor"].tower else 0
    found = []
    for slot in range(config.slots):
        engine = f"rollout/{slot // width}" + (f" ({slot % width + 1} of {width})" if width > 1 else "")
        roles = ", ".join(_held(role, shape, slot % stages, stages) for role, shape in shapes.items())
        mine = len(range(slot, encoders, config.slots))
        found.append(
            SlotPlacement(slot, slot // config.trainer.n_gpus_per_node, engine, f"trainer/{slot}: {roles}", mine)
        )
    return found


def _held(role: str, shape: Shape, position: int, stages: int) -> str:
    if stages == 1:
        return role
    layers = stage_of(shape, role, position, stages).layers
    return f"{role} layers {layers.start}-{layers.stop - 1}" if layers else f"{role} head"
