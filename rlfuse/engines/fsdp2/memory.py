"""Memory of a model on a rank under PyTorch's FSDP2, as `fsdp2_model` uses it. Does not import torch.

Float32 weights, trained or frozen, and their gradients and moments are divided over all ranks. On two ranks (torch
2.13, 109 million parameters, float32 and bfloat16) the peak of a pass was within 7 % of the sizes below; a step took
less.
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
    """`ModelMemory` of FSDP2."""

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
        """Return the memory gathered at the start of a forward pass, or reduced at the end of a backward pass."""
        found = []
        for role, shape in shapes.items():
            layer, outside = max(shape.layers), shape.parameters - sum(shape.layers)
            sizes = {"gathered parameters": 2 * (outside + layer) * self._item}
            if role != "reference":
                sizes["gradients being reduced"] = (outside + 2 * layer) * (self._item + FLOAT32)
            found += [Part(role, what, size, Item.ACTIVATIONS) for what, size in sizes.items()]
        return [max(found, key=lambda part: part.size)]
