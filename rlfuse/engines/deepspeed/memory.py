"""Memory of a model on a rank under DeepSpeed 0.19's ZeRO (arXiv 1910.02054). Imports neither torch nor DeepSpeed.

on the device, bytes a parameter, bfloat16            ZeRO 0     1             2             3
parameters                                              2        2             2         2 / copies
gradients, summed in float32, from the first
  backward to the step                                  4        4        4 / copies     4 / copies, always
masters and moments (none with offload_optimizer)      12    12 / copies   12 / copies   12 / copies
after `trainer.offloading.to_host` all are 0, trained or frozen, for any stage
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_memory import ITEM, STATES, Part, gradient_item
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import Item

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradient elements per reduction; DeepSpeed's default of 500 million takes 2 GB in float32."""
ZERO0_BUCKET_ELEMENTS = 500_000_000
"""Gradient elements per reduction in DeepSpeed without ZeRO."""
MAX_GATHERED_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO 3 gathers at a time, at most."""


class ZeroMemory:
    """`ModelMemory` of DeepSpeed."""

    choices: ClassVar[Mapping[str, tuple[object, ...]]] = {"actor.zero_stage": (0, 1, 2, 3)}

    def __init__(self, config: Config, copies: int, device: str) -> None:
        self._config, self._copies, self._device = config, copies, device
        self._stage, self._item = config.actor.zero_stage, ITEM[config.model.dtype]
        self._sum = gradient_item(config)
        # ZeRO 3 allocates gradients at its start, the other stages in a backward pass.
        self._of_gradients = Item.PARAMETERS if self._stage == 3 else Item.GRADIENTS

    def parameters(self, held: float) -> float:
        return held * self._item / (self._copies if self._stage == 3 else 1)

    def states(self, role: str, held: float) -> list[Part]:
        gradients = self._sum * held / (self._copies if self._stage > 1 else 1)
        found = [Part(role, "gradients", gradients, self._of_gradients)]
        if not self._config.actor.offload_optimizer:
            master = 4 if self._item == 2 or self._stage >= 1 else 0
            share = held / self._copies if self._stage >= 1 else held
            found.append(Part(role, "optimizer", (master + STATES) * share, Item.OPTIMIZER))
        return found

    def buffers(self, role: str, held: float) -> list[Part]:
        if self._stage == 0 or self._device == "cpu":
            return []
        return [Part(role, "reduction buffer", REDUCE_BUCKET_ELEMENTS * self._sum, self._of_gradients)]

    def in_step(self, role: str, held: float) -> list[list[Part]]:
        if self._stage == 0:
            copy = 4 * held if self._config.actor.grad_accum_dtype == "bfloat16" and self._item == 2 else 0
            size = copy + 4 * min(held, ZERO0_BUCKET_ELEMENTS)
            return [[Part(role, "gradients in a step", size, Item.ACTIVATIONS)]]
        step = [Part(role, "gradients in a step", 4 * held / self._copies, Item.ACTIVATIONS)]
        if self._device != "cpu":
            return [step]
        # Allocated on use, while activations are freed.
        return [[Part(role, "reduction buffer", min(REDUCE_BUCKET_ELEMENTS, held) * self._sum, Item.ACTIVATIONS)], step]

    def in_passes(self, shapes: Mapping[str, Shape]) -> list[Part]:
        if self._stage < 3:
            return []
        live = max(min(shape.parameters, MAX_GATHERED_PARAMETERS) for shape in shapes.values())
        return [Part("actor", "gathered parameters", live * self._item, Item.ACTIVATIONS)]
