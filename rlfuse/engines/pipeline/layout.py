"""Which stage of which pipeline stands on which device: pure functions of a model's degrees.

Role: read by the executor (who sends what to whom), by ranks (what to load) and by the group (who holds what). Devices
are numbered within a block, one block running one schedule; with data parallelism over blocks, device d of block b is
rank b * devices + d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlfuse.fusion.schedules.operations import Operation


@dataclass(frozen=True, slots=True)
class Pipelines:
    """One model's pipelines in a block. Pipeline p stands on devices p * stages .. (p + 1) * stages - 1.

    With two chunks a device holds two stages of a model in a V (Qi et al. 2024, arXiv 2405.15362): chunk-stages
    0 .. 2 * stages - 1, of which c >= stages stands where 2 * stages - 1 - c does.
    """

    model: str
    """`actor`, `critic` or `ref`."""
    stages: int
    pipelines: int = 1
    direction: Literal["down", "up"] = "down"
    """Stage 0 stands on the pipeline's first device (down) or on its last (up)."""
    chunks: int = 1
    layers: tuple[int, ...] | None = None
    """Layers of each (chunk-)stage; None balances them by `partition.modelled_costs`."""

    def __post_init__(self):
        if self.chunks not in (1, 2):
            raise ValueError(f"{self.model}: chunks={self.chunks}, but a device holds 1 stage, or 2 in a V.")
        if self.layers is not None and len(self.layers) != self.depth:
            raise ValueError(f"{self.model}: layers={self.layers} names {len(self.layers)} stages, not {self.depth}.")

    @property
    def depth(self) -> int:
        """Stages that a micro-batch passes."""
        return self.stages * self.chunks

    @property
    def devices(self) -> int:
        return self.stages * self.pipelines

    def device(self, pipeline: int, stage: int) -> int:
        """Where a stage stands within the block."""
        position = stage if stage < self.stages else 2 * self.stages - 1 - stage
        return pipeline * self.stages + (position if self.direction == "down" else self.stages - 1 - position)

    def pipeline(self, device: int) -> int:
        return device // self.stages

    def stages_on(self, device: int) -> tuple[int, ...]:
        pipeline = self.pipeline(device)
        return tuple(stage for stage in range(self.depth) if self.device(pipeline, stage) == device)

    def source(self, operation: Operation) -> int | None:
        """The stage whose result an operation waits for: before it in F, behind it in B; None at the ends and in W."""
        stage = {"F": operation.stage - 1, "B": operation.stage + 1, "W": -1}[operation.kind]
        return stage if 0 <= stage < self.depth else None

    def target(self, operation: Operation) -> int | None:
        """The stage that waits for an operation's result."""
        stage = {"F": operation.stage + 1, "B": operation.stage - 1, "W": -1}[operation.kind]
        return stage if 0 <= stage < self.depth else None


def block_size(layout: Sequence[Pipelines], world: int) -> int:
    """Devices of a block. ValueError unless all models take as many, and they divide the ranks."""
    sizes = {pipelines.model: pipelines.devices for pipelines in layout}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"Models of one schedule share their devices, but take {sizes} (stages * pipelines): make these equal."
        )
    size = next(iter(sizes.values()))
    if world % size:
        raise ValueError(f"{world} ranks are no whole number of blocks of {size} devices (stages * pipelines).")
    return size
