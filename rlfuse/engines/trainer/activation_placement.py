"""Placement of each layer's activations until the backward pass, decided per micro-batch from its tokens.

Role: used by `activation_offloading` and the memory plan; pure. If all fit on the device, they stay. Otherwise the last
layers stay as far as they fit; of the others, as many as can be copied during compute go to host memory, then to disk,
evenly spaced; the rest are recomputed (MEMO, Zhao et al. 2024, arXiv 2407.12117; SSDTrain, arXiv 2408.10013).
Invariants: no tier exceeds its capacity; the last layer stays unless all are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

MAX_COPY_RATIO = 1.5
"""Maximum time of a copy relative to its layer's forward pass: the delay of half a layer in each direction costs as
much as recomputation."""


class Place(StrEnum):
    """Place of a layer's activations; RECOMPUTE: nowhere, the layer is recomputed."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    RECOMPUTE = "again"


TIERS = (Place.HOST, Place.DISK)
"""Tiers off the device, fastest first."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Size and time of a decoder layer for a micro-batch."""

    activations: float
    """Bytes of its activations; infinite if unknown."""
    inputs: float
    """Bytes of the inputs needed to recompute it."""
    seconds: float
    """Seconds of its forward pass."""


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """Capacity and speed of a tier for one rank."""

    bytes: float = 0.0
    bytes_per_s: float = 0.0
    """Speed in either direction."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of the layers' activations in order, and of the inputs of recomputed layers."""

    layers: tuple[Place, ...]
    inputs: Place = Place.DEVICE


def place_activations(
    count: int, layer: Layer, device: float, tiers: Mapping[Place, TierCapacity], recompute_all: bool = False
) -> Placement:
    """Place the activations of `count` layers; `device` bytes may stay, and with `recompute_all` all layers are
    recomputed.

    Example: 4 layers of 10 bytes in 20, with a disk of 100 that is fast enough -> disk, disk, device, device.
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
    """Return the fraction of layers that can be copied while all of them compute."""
    if not room.bytes_per_s or layer.activations == float("inf"):
        return 0.0
    copy = layer.activations / room.bytes_per_s
    return 1.0 if copy <= MAX_COPY_RATIO * layer.seconds else layer.seconds / copy


def _spread(count: int, size: float, shares: Mapping[Place, float], left: dict[Place, float]) -> list[Place]:
    """Distribute `count` layers of `size` bytes over tiers by `shares` and capacity `left`; recompute the others."""
    chosen, due = [], dict.fromkeys(shares, 0.0)
    for _ in range(count):
        due = {tier: min(due[tier] + shares[tier], 1.0) for tier in due}
        free = (tier for tier in TIERS if due.get(tier, 0.0) > 1 - 1e-9 and left[tier] >= size)
        chosen.append(next(free, Place.RECOMPUTE))
        if chosen[-1] in due:
            due[chosen[-1]] -= 1.0
            left[chosen[-1]] -= size
    return chosen
