"""The contract of a trainer backend's memory model: memory of its models on a rank, from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import Item

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_CACHED_BYTES = 32 << 20  # maximum size of a tensor whose memory a CPU rank caches for reuse
STATES = 8  # bytes per parameter: AdamW's two moments in float32


def gradient_item(config: Config) -> int:
    """Return the bytes per element of accumulated gradients. Those of float32 weights are float32."""
    return max(ITEM[config.model.dtype], ITEM[config.actor.grad_accum_dtype])


@dataclass(frozen=True, slots=True)
class Part:
    """One allocation on the device."""

    role: str  # `actor`, `critic`, `reference`, `engine`, `tower`, `reward models` or `processes`
    what: str
    size: float  # bytes
    item: Item  # determines when it is resident


class ModelMemory(Protocol):
    """Memory model of a backend, for models of `held` parameters on `copies` ranks; sizes are bytes on one rank."""

    choices: ClassVar[Mapping[str, tuple[object, ...]]]
    """Keys that trade memory for communication, with their values from most to least memory."""

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
