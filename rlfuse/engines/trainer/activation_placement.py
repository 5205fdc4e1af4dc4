"""Where each layer's activations wait for their backward pass: a pure decision for every micro-batch, by its tokens.

Role: asked by `activation_offloading` and the memory plan. If all fit on the device, nothing is done. Otherwise the
last layers stay as far as they fit; of the others as many as can be copied while layers compute go to host memory, then
to disk, evenly spread; the rest are recomputed (MEMO, Zhao et al. 2024, arXiv 2407.12117; SSDTrain, arXiv 2408.10013).
Invariants: no tier gets more than it has room for; the last layer stays unless all are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

MAX_COPY_RATIO = 1.5
"""A copy may take so many times as long as its layer: late by half of it on either way, which is what running it again
takes."""


class Place(StrEnum):
    """Where what a layer leaves waits; AGAIN: nowhere, it is run again."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    RECOMPUTE = "again"


TIERS = (Place.HOST, Place.DISK)
"""The faster first."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer's part of a micro-batch."""

    activations: float
    """Bytes that it leaves; infinite while nobody knows."""
    inputs: float
    """Bytes from which it can be run again."""
    seconds: float
    """Of its forward pass."""


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """Of a tier, for one rank."""

    bytes: float = 0.0
    bytes_per_s: float = 0.0
    """Either way."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Of the layers in their order, and of the inputs of those that are run again."""

    layers: tuple[Place, ...]
    inputs: Place = Place.DEVICE


def place_activations(
    count: int, layer: Layer, device: float, tiers: Mapping[Place, TierCapacity], recompute_all: bool = False
) -> Placement:
    """Of `count` layers, where `device` bytes may stay; `recompute_all`: all are run again, whatever there is room for.

    Example: 4 layers of 10 bytes in 20 with a disk of 100 that keeps up -> disk, disk, device, device.
    """
    if not recompute_all and count * layer.activations <= device:
        return Placement((Place.DEVICE,) * count)
    staying = 0 if recompute_all else max(1, min(count, int(device // layer.activations)))
    leaving, left = count - staying, {tier: room.bytes for tier, room in tiers.items()}
    inputs, needed = Place.DEVICE, leaving * layer.inputs
    if needed > device - (staying * layer.activations if staying else 0.0):
        inputs = next((tier for tier in TIERS if needed <= left.get(tier, 0.0)), Place.DEVICE)
    if inputs in left:
        left[inputs] -= needed
    shares = {tier: 0.0 if recompute_all else _kept_up_with(layer, room) for tier, room in tiers.items()}
    chosen = _spread(leaving, layer.activations, shares, left)
    return Placement((*chosen, *(Place.DEVICE,) * staying), inputs if Place.RECOMPUTE in chosen else Place.DEVICE)


def _kept_up_with(layer: Layer, room: TierCapacity) -> float:
    """Share of the layers that can be copied while all of them compute."""
    if not room.bytes_per_s or layer.activations == float("inf"):
        return 0.0
    copy = layer.activations / room.bytes_per_s
    return 1.0 if copy <= MAX_COPY_RATIO * layer.seconds else layer.seconds / copy


def _spread(count: int, size: float, shares: Mapping[Place, float], left: dict[Place, float]) -> list[Place]:
    """Of `count` layers so large: to tiers in these shares while there is room, in between run again."""
    chosen, due = [], dict.fromkeys(shares, 0.0)
    for _ in range(count):
        due = {tier: min(due[tier] + shares[tier], 1.0) for tier in due}
        free = (tier for tier in TIERS if due.get(tier, 0.0) > 1 - 1e-9 and left[tier] >= size)
        chosen.append(next(free, Place.RECOMPUTE))
        if chosen[-1] in due:
            due[chosen[-1]] -= 1.0
            left[chosen[-1]] -= size
    return chosen
