"""Rates and latencies of a device and its links, from which the costs of any model are derived.

Collectives are modelled as rings within and between nodes (Megatron; Pipette, arXiv 2405.18093). A calibration file
stores measured values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import yaml

from rlfuse.config.input_files import FLAG, AtLeastZero, Count, Index, InputError, Positive, Schema, one_of, read_yaml
from rlfuse.files import write_atomically

ADAM_BYTES = 32  # bytes per parameter read and written by an optimizer step: weights and moments
RATES = ["pass_flops", "train_flops", "decode_flops", "bytes_per_s", "hidden_bytes_per_s", "update_bytes_per_s"]
RATES += ["copied_bytes_per_s"]
LATENCIES = ["pass_call_s", "train_call_s", "decode_step_s", "decode_sequence_s", "decode_attention_s", "layer_s"]
LATENCIES += ["optimizer_s"]
"""Coefficients of local work, which other busy devices of the node slow down."""
END_LAYERS = 2  # embedding and head of a micro-batch, in layers of launch latency
KINDS = ("generating", "scoring", "training")  # kinds of work with separate forecast errors


class NodeSpeed(NamedTuple):
    """Speed of a node's devices relative to the default device of the cluster."""

    compute: float = 1.0
    memory: float = 1.0  # memory bandwidth


class WorkSpeed(NamedTuple):
    """Speed of a node or engine relative to the costs of a plan."""

    compute: float = 1.0  # scoring, training and prefill
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Links:
    """Full-duplex bandwidth (bytes per second) and latency (seconds) of a device's links."""

    within_bytes_per_s: float = inf
    between_bytes_per_s: float = inf  # per device while all devices of the node send
    within_s: float = 0.0
    between_s: float = 0.0
    per_node: int = 1 << 30  # devices per node

    def send(self, size: float, far: bool) -> float:
        if far:
            return self.between_s + size / self.between_bytes_per_s
        return self.within_s + size / self.within_bytes_per_s

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather (or reduce-scatter) of `size` bytes in total over `ranks`. `stride`:
        devices from one rank to the next, hence the number of rings that share a node's links."""
        here = min(ranks, max(1, self.per_node // stride))
        nodes = -(-ranks // here)
        within = (here - 1) * (self.within_s + size / ranks * nodes / self.within_bytes_per_s)
        return within + (nodes - 1) * (self.between_s + size / ranks / self.between_bytes_per_s)

    def all_reduce(self, size: float, ranks: int) -> float:
        return 2 * self.all_gather(size, ranks)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Measured coefficients of one kind of device. Rates are per second, times in seconds."""

    pass_flops: Positive  # FLOP/s of scoring passes and prefill
    train_flops: Positive  # FLOP/s of forward and backward
    decode_flops: Positive
    bytes_per_s: Positive  # memory bandwidth while decoding
    pass_call_s: AtLeastZero = 0.0  # fixed cost of each scoring call
    train_call_s: AtLeastZero = 0.0
    decode_step_s: AtLeastZero = 0.0  # fixed cost of each decoding step: scheduling, sampling
    decode_sequence_s: AtLeastZero = 0.0  # fixed cost per sequence of a decoding step
    decode_attention_s: AtLeastZero = 0.0  # per sequence and layer of a decoding step, without reading the cache
    decode_overlaps: Annotated[bool, FLAG] = True  # True if decoding overlaps compute with reading weights
    layer_s: AtLeastZero = 0.0  # launch latency per layer of a micro-batch's forward pass (plus END_LAYERS)
    optimizer_s: AtLeastZero = 0.0  # fixed cost of each optimizer step
    gather_s: AtLeastZero = 0.0  # fixed cost per module gathered by ZeRO 3, in each pass
    step_s: AtLeastZero = 0.0  # fixed cost per training step of the job
    crowding: AtLeastZero = 0.0  # relative slowdown per other busy device of the node
    hidden_bytes_per_s: Positive = inf  # hidden states of a layer in a forward pass
    update_bytes_per_s: Positive | None = None  # in-place optimizer updates; None: `bytes_per_s`
    copied_bytes_per_s: Positive | None = None  # copies into new memory on CPUs; None: the update rate
    sent_bytes_per_s: Positive | None = None  # measured bandwidth between ranks of a node
    host_bytes_per_s: Positive = inf  # bandwidth between a device and host memory


@dataclass(frozen=True, slots=True)
class Hardware(Coefficients):
    """One kind of device with its links and forecast errors."""

    links: Links = Links()
    errors: Mapping[str, float] = field(default_factory=dict)  # kind of work -> relative error of forecasts

    @property
    def is_host(self) -> bool:
        """True if ranks run on CPUs: they communicate over gloo and allocate from system memory."""
        return bool(self.copied_bytes_per_s)

    @property
    def update_rate(self) -> float:
        return self.update_bytes_per_s or self.bytes_per_s

    @property
    def copy_rate(self) -> float:
        return self.copied_bytes_per_s or self.update_rate

    def decoding_s(self, read_s: float, computed_s: float) -> float:
        return max(read_s, computed_s) if self.decode_overlaps else read_s + computed_s

    def with_node_size(self, devices: int) -> Hardware:
        return replace(self.with_busy_peers(devices - 1), links=replace(self.links, per_node=devices))

    def with_busy_peers(self, busy_peers: int) -> Hardware:
        longer = 1 + self.crowding * busy_peers
        if longer == 1:
            return self
        slower = {name: rate / longer for name in RATES if (rate := getattr(self, name)) is not None}
        return replace(self, **slower, **{name: getattr(self, name) * longer for name in LATENCIES}, crowding=0.0)


Text = Annotated[str, Schema(type="string", minLength=1)]


class CalibrationError(InputError):
    """Insufficient input for a calibration, or an invalid calibration file."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean relative errors on held-out steps; None if too little of a kind was measured."""

    generating: AtLeastZero | None = None
    scoring: AtLeastZero | None = None
    training: AtLeastZero | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of measurements: a run, or one model of a probe."""

    name: Text
    parameters: Index
    layers: Index
    hidden: Index
    prompt_tokens: AtLeastZero  # mean
    response_tokens: AtLeastZero
    longest: Index  # tokens of the longest sample
    slots: Count
    generating: Index = 0  # number of measurements of each kind, for runs
    scoring: Index = 0
    training: Index = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Contents of `calibration.yaml`."""

    measured: Annotated[str, one_of("runs", "probe")]
    device: Text
    count: Count  # devices busy at the same time; on CPUs, cores
    rlfuse: Text
    hardware: Coefficients
    errors: Errors
    held_out: Text
    fitted_on: tuple[Source, ...]
    not_measured: tuple[Text, ...] = ()
    product_flops: Positive | None = None
    """FLOP/s of matrix products alone; its ratio to that of another device is `product_ratio` of a cluster file."""
    copy_bytes_per_s: Positive | None = None
    """Bytes per second of copies alone; likewise for `copy_ratio`."""

    def as_hardware(self) -> Hardware:
        """Return the device with infinitely fast links; the caller replaces them."""
        errors = {kind: error for kind, error in asdict(self.errors).items() if error is not None}
        return Hardware(**asdict(self.hardware), errors=errors)


def rounded_coefficients(hardware: Hardware) -> Coefficients:
    """Return the coefficients rounded to six digits."""
    given = {entry.name: getattr(hardware, entry.name) for entry in fields(Coefficients)}
    known = {name: float(f"{each:.6g}") for name, each in given.items() if each is not None}
    return Coefficients(**known | {"decode_overlaps": hardware.decode_overlaps})


def write(calibration: Calibration, path: Path) -> None:
    """Write a calibration as YAML. Raises NotWritable."""
    write_atomically(path, yaml.safe_dump(_plain(asdict(calibration)), sort_keys=False, width=100))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each not in (None, inf)}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def read_calibration(path: Path) -> Calibration:
    """Read and validate a calibration file. Raises CalibrationError, naming line, field and value."""
    return read_yaml(path, Calibration, CalibrationError, "`rlfuse calibrate` writes such a file")
