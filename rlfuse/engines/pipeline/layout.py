"""Which stage of which pipeline stands on which device: pure functions of a model's degrees.

Role: read by the executor (who sends what to whom), by ranks (what to load) and by the group (who holds what). Devices
are numbered within a block, one block running one schedule; with data parallelism over blocks, device d of block b is
rank b * devices + d. Where ranks share layers (`trainer.tensor_parallel`), as many consecutive ones are one device: all
run its row of the schedule, each with its share of every layer, and hand on to those that have the same share.
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
    """One model's pipelines in a block. Pipeline p stands on devices p * stages .. (p + 1) * stages - 1.

    With several chunks a device holds as many stages of a model: chunk-stages 0 .. chunks * stages - 1, which go there
    and back or round and round.
    """

    model: str
    """`actor`, `critic` or `ref`."""
    stages: int
    pipelines: int = 1
    direction: Literal["down", "up"] = "down"
    """Stage 0 stands on the pipeline's first device (down) or on its last (up)."""
    chunks: int = 1
    placement: str = "v"
    """`v` or `interleaved`; see `operations.place_of`."""
    layers: tuple[int, ...] | None = None
    """Layers of each (chunk-)stage; None: as `balanced` has them of modelled costs."""
    vocabulary: bool = False
    """Whether all devices of a pipeline share the head: the device with stage s < stages has the s-th share."""
    width: int = 1
    """Ranks that share the layers of a stage, and so are one device."""

    def __post_init__(self):
        if self.chunks < 1:
            raise ValueError(f"{self.model}: chunks={self.chunks}, but a device holds at least 1 stage.")
        if self.layers is not None and len(self.layers) != self.depth:
            raise ValueError(f"{self.model}: layers={self.layers} names {len(self.layers)} stages, not {self.depth}.")

    @property
    def depth(self) -> int:
        """Stages that a micro-batch passes."""
        return self.stages * self.chunks

    @property
    def sharers(self) -> int:
        """Of the head."""
        return self.stages if self.vocabulary else 1

    @property
    def devices(self) -> int:
        return self.stages * self.pipelines

    def mesh(self, world: int) -> ParallelMesh:
        """Return the mesh of this model: dp pipelines of all blocks, of pp stages."""
        return ParallelMesh.of(world, pp=self.stages, tp=self.width)

    def device(self, pipeline: int, stage: int) -> int:
        """Where a stage stands within the block."""
        position = place_of(stage, self.stages, self.placement)
        return pipeline * self.stages + (position if self.direction == "down" else self.stages - 1 - position)

    def pipeline(self, device: int) -> int:
        return device // self.stages

    def stages_on(self, device: int) -> tuple[int, ...]:
        pipeline = self.pipeline(device)
        return tuple(stage for stage in range(self.depth) if self.device(pipeline, stage) == device)

    def balanced(self, costs: LayerCosts, rates: Sequence[float] = (), most: Sequence[int] = ()) -> tuple[int, ...]:
        """Layers of each (chunk-)stage with which the slowest device is as fast as can be; `rates`, `most`: of each."""
        layers, embedding, head = costs
        head = 0.0 if self.vocabulary else head  # a share is on every device, whatever the cut
        if self.chunks == 1:
            return balanced(layers, embedding, head, self.stages, rates, most)
        return balanced_chunks(
            layers, embedding, head, [self.device(0, stage) for stage in range(self.depth)], rates, most
        )

    def source(self, operation: Operation) -> int | None:
        """The stage whose result an operation waits for: before it in F, behind it in B; None at the ends, and in W and
        H."""
        stage = {"F": operation.stage - 1, "B": operation.stage + 1}.get(operation.kind, -1)
        return stage if 0 <= stage < self.depth else None

    def target(self, operation: Operation) -> int | None:
        """The stage that waits for an operation's result."""
        stage = {"F": operation.stage + 1, "B": operation.stage - 1}.get(operation.kind, -1)
        return stage if 0 <= stage < self.depth else None


def pipelines_of(config: Config, model: str) -> Pipelines:
    """As a job has them: one in each block."""
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

    ValueError unless all models take as many devices of as many ranks, and these divide the ranks.
    """
    sizes = {pipelines.model: pipelines.devices for pipelines in layout}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"Models of one schedule share their devices, but take {sizes} (stages * pipelines): make these equal."
        )
    widths = {pipelines.model: pipelines.width for pipelines in layout}
    if len(set(widths.values())) != 1:
        raise ValueError(f"Models of one schedule share their devices, but these are {widths} ranks: make these equal.")
    size, width = next(iter(sizes.values())), next(iter(widths.values()))
    if world % (size * width):
        of = f" of {width} ranks" if width > 1 else ""
        raise ValueError(f"{world} ranks are no whole number of blocks of {size} devices{of} (stages * pipelines).")
    return ParallelMesh.of(world, pp=size, tp=width)
