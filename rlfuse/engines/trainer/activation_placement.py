"""Placement of each layer's activations until the backward pass, decided per micro-batch from its tokens.

Role: used by `activation_offloading` and the memory plan; pure. If all fit on the device, they stay. Otherwise the last
layers stay as far as they fit; of the others, as many as can be copied during compute go to host memory, evenly spaced;
the rest are recomputed (MEMO, Zhao et al. 2024, arXiv 2407.12117). The last layer stays unless all are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_COPY_RATIO = 1.5
"""Maximum time of a copy relative to its layer's forward pass: the delay of half a layer in each direction costs as
much as recomputation."""


class Place(StrEnum):
    """Place of a layer's activations; RECOMPUTE: nowhere, the layer is recomputed."""

    DEVICE = "device"
    HOST = "host"
    RECOMPUTE = "again"


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
class HostCapacity:
    """Host memory of one rank for activations, and the speed of copies."""

    bytes: float = 0.0
    bytes_per_s: float = 0.0
    """Speed in either direction."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of the layers' activations in order, and of the inputs of recomputed layers."""

    layers: tuple[Place, ...]
    inputs: Place = Place.DEVICE


def place_activations(
    count: int, layer: Layer, device: float, host: HostCapacity, recompute_all: bool = False
) -> Placement:
    """Place the activations of `count` layers; `device` bytes may stay, and with `recompute_all` all layers are
    recomputed.

    Example: 4 layers of 10 bytes in 20, with 100 bytes on a fast host -> host, host, device, device.
    """
    if not recompute_all and count * layer.activations <= device:
        return Placement((Place.DEVICE,) * count)
    staying = 0 if recompute_all else max(1, min(count, int(device // layer.activations)))
    leaving, left = count - staying, host.bytes
    inputs, needed = Place.DEVICE, leaving * layer.inputs
    if device - (staying * layer.activations if staying else 0.0) < needed <= left:
        inputs, left = Place.HOST, left - needed
    share = 0.0 if recompute_all else _kept_up_with(layer, host)
    chosen = _spread(leaving, layer.activations, share, left)
    return Placement((*chosen, *(Place.DEVICE,) * staying), inputs if Place.RECOMPUTE in chosen else Place.DEVICE)


def _kept_up_with(layer: Layer, host: HostCapacity) -> float:
    """Return the fraction of layers that can be copied while all of them compute."""
    if not host.bytes_per_s or layer.activations == float("inf"):
        return 0.0
    copy = layer.activations / host.bytes_per_s
    return 1.0 if copy <= MAX_COPY_RATIO * layer.seconds else layer.seconds / copy


def _spread(count: int, size: float, share: float, left: float) -> list[Place]:
    """Place `share` of `count` layers of `size` bytes in `left` bytes of host memory; recompute the others."""
    chosen, due = [], 0.0
    for _ in range(count):
        due = min(due + share, 1.0)
        if due > 1 - 1e-9 and left >= size:
            chosen.append(Place.HOST)
            due, left = due - 1.0, left - size
        else:
            chosen.append(Place.RECOMPUTE)
    return chosen
