"""The contract of a trainer backend's memory model: memory of its models on a rank, from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import Item

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_CACHED_BYTES = 32 << 20  # of a tensor whose memory a rank on CPUs keeps for the next one
STATES = 8  # bytes a parameter: AdamW's two moments, in float32


def gradient_item(config: Config) -> int:
    """Return the bytes of a number of a gradient's sum. Those of float32 weights are float32."""
    return max(ITEM[config.model.dtype], ITEM[config.actor.grad_accum_dtype])


@dataclass(frozen=True, slots=True)
class Part:
    """One allocation on the device."""

    role: str  # `actor`, `critic`, `reference`, `engine`, `tower`, `reward models` or `processes`
    what: str
    size: float  # bytes
    item: Item  # when it is there


class ModelMemory(Protocol):
    """Of models that `copies` ranks hold, `held` parameters each; sizes are bytes on one rank."""

    choices: ClassVar[Mapping[str, tuple[object, ...]]]
    """Keys that trade memory for exchanges among ranks: values from the most memory to the least."""

    def __init__(self, config: Config, copies: int, device: str) -> None: ...

    def parameters(self, held: float) -> float:
        """Return the size of a model's weights, trained or frozen."""

    def states(self, role: str, held: float) -> list[Part]:
        """Return the gradients and optimizer state of a trained model."""

    def buffers(self, role: str, held: float) -> list[Part]:
        """Return the buffers that stay allocated to reduce gradients."""

    def in_step(self, role: str, held: float) -> list[list[Part]]:
        """Return the memory of an optimizer step after activations are freed, by phase; optimizers step in the last."""

    def in_passes(self, shapes: Mapping[str, Shape]) -> list[Part]:
        """Return the memory of passes without activations; `shapes`: by role."""
