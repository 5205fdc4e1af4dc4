"""Predict which activations wait off a device or are recomputed, as trainer ranks decide it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.activation_places import TIERS, Layer, Place, Places, Room, places
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.tracing import Texts, Work

MIB, GIB = 1 << 20, 1 << 30
DISK_BYTES_PER_S = 2e9
"""Of an NVMe drive, either way, where nothing was measured; ranks measure theirs."""
ENDURANCE = 600e12
"""Bytes that a drive of 1 TB is rated for to be written, as makers state it of consumers' drives (600 TBW)."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """What becomes of a micro-batch's activations."""

    tokens: int
    layer: float  # bytes that the largest layer leaves
    places: Places
    peak: float  # bytes on the device at most

    def waiting(self, tier: Place) -> float:
        """Bytes of layers there."""
        return self.places.layers.count(tier) * self.layer

    @property
    def run_again(self) -> float:
        """Share of the layers."""
        return self.places.layers.count(Place.AGAIN) / len(self.places.layers)


def leaving(
    config: Config, shape: Shape, role: str, texts: Texts, device: str, seconds: float = inf, host_s: float = inf
) -> Leaving:
    """Of a micro-batch that `role` learns from. `seconds`: of its forward pass through a layer; `host_s`: bytes a
    second to the host. By default copies keep up."""
    model, tokens = config.model, sum(map(sum, texts.lengths))
    kept = _work(config, shape, role, texts, device, model.enable_gradient_checkpointing)
    if not model.enable_activation_offload:
        usual = Place.AGAIN if model.enable_gradient_checkpointing else Place.DEVICE
        return Leaving(tokens, max(kept.layers), Places((usual,) * len(kept.layers)), kept.peak)
    again = _work(config, shape, role, texts, device, True)
    layer, tiers = Layer(max(kept.layers), max(again.layers), seconds), tiers_of(config, device, host_s)
    count, most = len(kept.layers), model.activation_device_mb * MIB
    found = places(count, layer, most, tiers, model.enable_gradient_checkpointing)
    inputs = found.layers.count(Place.AGAIN) * layer.inputs
    gone = sum(kept.layers[i] for i, place in enumerate(found.layers) if place is not Place.DEVICE)
    stays = inputs if found.inputs is Place.DEVICE else 0.0
    return Leaving(tokens, layer.activations, found, max(kept.peak - gone + stays, again.peak - inputs + stays))


def tiers_of(config: Config, device: str, host_s: float) -> dict[Place, Room]:
    """As ranks have them; a host without a limit of its own is taken to have room."""
    model = config.model
    host = inf if model.activation_host_mb is None else model.activation_host_mb * MIB
    rooms = {Place.HOST: Room(host if device == "cuda" else 0.0, host_s)}
    return rooms | {Place.DISK: Room(model.activation_disk_mb * MIB, DISK_BYTES_PER_S)}


def _work(config: Config, shape: Shape, role: str, texts: Texts, device: str, again: bool) -> Work:
    model = replace(config.model, enable_gradient_checkpointing=again)
    return shape.model.work(replace(config, model=model), role, texts, device)


def words(found: Leaving, role: str) -> Iterator[str]:
    """A line on what leaves, and one on what a disk bears."""
    layers = found.places.layers
    counts = {place: layers.count(place) for place in (*TIERS, Place.AGAIN) if place in layers}
    if not counts:
        return
    named = {Place.HOST: "wait in host memory", Place.DISK: "wait on the disk", Place.AGAIN: "are run again"}
    parts = ", ".join(f"{count} {named[place]}" for place, count in counts.items())
    yield f"{role}: in a micro-batch of {found.tokens:,} tokens, of {len(layers)} layers {parts}"
    if written := found.waiting(Place.DISK):
        yield (
            f"{role}: each such micro-batch writes {written / GIB:.2f} GiB to the disk; a drive rated for "
            f"{ENDURANCE / 1e12:.0f} TB written bears {ENDURANCE / written:,.0f} of them"
        )
