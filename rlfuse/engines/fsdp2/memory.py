"""What a model takes on a rank under PyTorch's FSDP2, as `fsdp2_model` uses it (read in torch 2.13). Imports no torch.

Float32 weights, trained or frozen, and their gradients and moments are divided over all ranks. A pass gathers, in
model.dtype, what is in no decoder layer for its whole length, and two layers at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_memory import ITEM, STATES, Part
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import Item

FLOAT32 = ITEM["float32"]


class Fsdp2Memory:
    """A `ModelMemory`."""

    choices: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def __init__(self, config: Config, copies: int, device: str) -> None:
        self._copies, self._item = copies, ITEM[config.model.dtype]

    def parameters(self, held: float) -> float:
        return FLOAT32 * held / self._copies

    def states(self, role: str, held: float) -> list[Part]:
        return [
            Part(role, "gradients", FLOAT32 * held / self._copies, Item.GRADIENTS),
            Part(role, "optimizer", STATES * held / self._copies, Item.OPTIMIZER),
        ]

    def buffers(self, role: str, held: float) -> list[Part]:
        return []

    def in_step(self, role: str, held: float) -> list[list[Part]]:
        return []

    def in_passes(self, shapes: Mapping[str, Shape]) -> list[Part]:
        """Gradients of a layer wait in the pass's dtype for a float32 copy, which goes with that of the next layer."""
        found = []
        for role, shape in shapes.items():
            layer = max(shape.layers)
            outside = shape.parameters - sum(shape.layers)
            sizes = {"gathered parameters": (outside + 2 * layer) * self._item}
            if role != "reference":
                sizes["gradients being reduced"] = outside * self._item + layer * (self._item + 2 * FLOAT32)
            found.append([Part(role, what, size, Item.ACTIVATIONS) for what, size in sizes.items()])
        return max(found, key=lambda parts: sum(part.size for part in parts))
