"""Placement of pipeline stages on devices, as pure functions of a model's parallel degrees.

Devices are numbered within a block, which runs one schedule: device d of block b is rank b * devices + d. With tensor
parallelism (`trainer.tensor_parallel`), a device consists of consecutive ranks, each with its share of every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.partition import LayerCosts, balanced, balanced_chunks
from rlfuse.fusion.schedules.operations import Operation, direction_of, place_of


@dataclass(frozen=True, slots=True)
class Pipelines:
    """One model's pipelines in a block. Pipeline p is on devices p * stages .. (p + 1) * stages - 1.

    With several chunks, each device holds as many stages of the model: chunk-stages 0 .. chunks * stages - 1, in
    V-shaped or interleaved placement.
    """

    model: str
    """`actor`, `critic` or `ref`."""
    stages: int
    pipelines: int = 1
    direction: Literal["down", "up"] = "down"
    """Stage 0 is on the pipeline's first device (down) or on its last (up)."""
    chunks: int = 1
    placement: str = "v"
    """`v` or `interleaved`; see `operations.place_of`."""
    layers: tuple[int, ...] | None = None
    """Number of layers of each (chunk-)stage; None: `balanced` by modelled costs."""
    vocabulary: bool = False
    """True if all devices of a pipeline share the head: the device of stage s < stages has share s."""
    width: int = 1
    """Tensor-parallel size: ranks that share the layers of a stage and form one device."""

    def __post_init__(self):
        if self.chunks < 1:
            raise ValueError(f"{self.model}: chunks={self.chunks}: must be at least 1.")
        if self.layers is not None and len(self.layers) != self.depth:
            raise ValueError(
                f"{self.model}: layers={self.layers} has {len(self.layers)} stages instead of {self.depth}."
            )

    @property
    def depth(self) -> int:
        """Number of stages that a micro-batch passes."""
        return self.stages * self.chunks

    @property
    def head_degree(self) -> int:
        """Number of shares of the head."""
        return self.stages if self.vocabulary else 1

    @property
    def devices(self) -> int:
        return self.stages * self.pipelines

    def mesh(self, world: int) -> ParallelMesh:
        """Return the mesh of this model: dp pipelines in all blocks, with pp stages."""
        return ParallelMesh.of(world, pp=self.stages, tp=self.width)

    def device(self, pipeline: int, stage: int) -> int:
        """Return the device of a stage within the block."""
        position = place_of(stage, self.stages, self.placement)
        return pipeline * self.stages + (position if self.direction == "down" else self.stages - 1 - position)

    def pipeline(self, device: int) -> int:
        return device // self.stages

    def stages_on(self, device: int) -> tuple[int, ...]:
        pipeline = self.pipeline(device)
        return tuple(stage for stage in range(self.depth) if self.device(pipeline, stage) == device)

    def balanced(self, costs: LayerCosts, rates: Sequence[float] = (), most: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the layers per (chunk-)stage that minimize the time of the slowest device. `rates`, `most`: per stage,
        see `partition.balanced`."""
        layers, embedding, head = costs
        head = 0.0 if self.vocabulary else head  # every device has an equal share
        if self.chunks == 1:
            return balanced(layers, embedding, head, self.stages, rates, most)
        return balanced_chunks(
            layers, embedding, head, [self.device(0, stage) for stage in range(self.depth)], rates, most
        )

    def source(self, operation: Operation) -> int | None:
        """Return the stage whose result an operation needs: the previous one for F, the next one for B, None at the
        ends and for W and H."""
        stage = {"F": operation.stage - 1, "B": operation.stage + 1}.get(operation.kind, -1)
        return stage if 0 <= stage < self.depth else None

    def target(self, operation: Operation) -> int | None:
        """Return the stage that needs an operation's result; None if there is none."""
        stage = {"F": operation.stage + 1, "B": operation.stage - 1}.get(operation.kind, -1)
        return stage if 0 <= stage < self.depth else None


def pipelines_of(config: Config, model: str) -> Pipelines:
    """Return the layout of `model` in a job: one pipeline per block."""
    training = config.training
    split = training.split_backward and config.fusion.training == "fused"
    return Pipelines(
        model,
        training.pipeline_parallel_size,
        direction=direction_of(model, split),
        chunks=training.virtual_pipeline_model_parallel_size,
        placement=training.pipeline_placement,
        vocabulary=training.vocabulary_parallel and model != "critic",
        width=training.tensor_model_parallel_size,
    )


def mesh_of(layout: Sequence[Pipelines], world: int) -> ParallelMesh:
    """Return the mesh of `world` ranks: dp blocks of pp devices of tp ranks.

    Raises ValueError unless all models use the same number of devices and ranks per device, and these divide `world`.
    """
    sizes = {pipelines.model: pipelines.devices for pipelines in layout}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"All models of a schedule must use the same number of devices (stages * pipelines), but got {sizes}."
        )
    widths = {pipelines.model: pipelines.width for pipelines in layout}
    if len(set(widths.values())) != 1:
        raise ValueError(f"All models of a schedule must use the same number of ranks per device, but got {widths}.")
    size, width = next(iter(sizes.values())), next(iter(widths.values()))
    if world % (size * width):
        of = f" of {width} ranks" if width > 1 else ""
        raise ValueError(f"{world} ranks are not a multiple of a block of {size} devices{of} (stages * pipelines).")
    return ParallelMesh.of(world, pp=size, tp=width)
