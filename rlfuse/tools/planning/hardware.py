"""What a device and its links do: the numbers from which the costs of any model follow.

Collective operations are rings, within nodes and between them (Megatron; Pipette, arXiv 2405.18093). A calibration
file holds the measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import yaml

from rlfuse.config.input_files import (
    FLAG,
    AtLeastZero,
    Count,
    Index,
    InputError,
    Positive,
    Schema,
    one_of,
    read_yaml,
)
from rlfuse.files import write_atomically

ADAM_BYTES = 32  # bytes of a parameter that an optimizer step reads and writes: weights and moments
RATES = ["pass_flops", "train_flops", "decode_flops", "bytes_per_s", "hidden_bytes_per_s", "update_bytes_per_s"]
RATES += ["copied_bytes_per_s"]
LATENCIES = ["pass_call_s", "train_call_s", "decode_step_s", "decode_sequence_s", "decode_attention_s", "layer_s"]
LATENCIES += ["optimizer_s"]
"""Of a device's own work: what other devices of its node slow."""
END_LAYERS = 2  # embedding and head of a micro-batch count as so many layers until their kernels run
KINDS = ("generating", "scoring", "training")  # kinds of work whose forecasts have errors of their own


class NodeSpeed(NamedTuple):
    """How many times as fast as the cluster's own devices those of a node are."""

    compute: float = 1.0
    memory: float = 1.0  # of reading it


class WorkSpeed(NamedTuple):
    """How many times as fast as by the costs of a plan its work is done on a node, or by an engine."""

    compute: float = 1.0  # scoring, training and prefill
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second that a device sends while it receives as many, and seconds until the first arrives."""

    within_bytes_per_s: float = inf
    between_bytes_per_s: float = inf  # of one device, while all devices of its node send to others
    within_s: float = 0.0
    between_s: float = 0.0
    per_node: int = 1 << 30  # devices of a node

    def send(self, size: float, far: bool) -> float:
        if far:
            return self.between_s + size / self.between_bytes_per_s
        return self.within_s + size / self.within_bytes_per_s

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each of `ranks` has all `size` bytes, of which each began with a part; so for reduce-scatter.
        `stride`: devices from one rank to the next, which is how many such rings share a node's links."""
        here = min(ranks, max(1, self.per_node // stride))
        nodes = -(-ranks // here)
        within = (here - 1) * (self.within_s + size / ranks * nodes / self.within_bytes_per_s)
        return within + (nodes - 1) * (self.between_s + size / ranks / self.between_bytes_per_s)

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        return 2 * self.all_gather(size, ranks, stride)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What is measured of one kind of device, as far as models make use of it."""

    pass_flops: Positive  # per second, in passes without gradients and in prefills
    train_flops: Positive  # per second, forward and backward
    decode_flops: Positive
    bytes_per_s: Positive  # from the device's memory, while decoding
    pass_call_s: AtLeastZero = 0.0  # fixed cost of each scoring call
    train_call_s: AtLeastZero = 0.0
    decode_step_s: AtLeastZero = 0.0  # fixed cost of each decoding step: scheduling, sampling
    decode_sequence_s: AtLeastZero = 0.0  # the same of each sequence of a decoding step
    decode_attention_s: AtLeastZero = 0.0  # per sequence and layer of a decoding step, besides its cache
    decode_overlaps: Annotated[bool, FLAG] = True  # whether decoding computes while it reads weights
    layer_s: AtLeastZero = 0.0  # per layer (and ENDS) of a micro-batch's forward pass, until kernels run
    optimizer_s: AtLeastZero = 0.0  # fixed cost of each optimizer step
    gather_s: AtLeastZero = 0.0  # per module that ZeRO 3 gathers, in each pass, besides its bytes
    step_s: AtLeastZero = 0.0  # per step of the job, besides its work and new weights
    crowding: AtLeastZero = 0.0  # share by which each other busy device of the node slows its work
    hidden_bytes_per_s: Positive = inf  # of a layer's hidden states in a forward pass
    update_bytes_per_s: Positive | None = None  # of optimizer steps, in place; None: as `bytes_per_s`
    copied_bytes_per_s: Positive | None = None  # into new memory, on hosts; None: as in updates
    sent_bytes_per_s: Positive | None = None  # between ranks of a node, as runs measured it
    host_bytes_per_s: Positive = inf  # between a device and its host's memory


@dataclass(frozen=True, slots=True)
class Hardware(Coefficients):
    """One kind of device, its links and the errors of forecasts for it."""

    links: Links = Links()
    errors: Mapping[str, float] = field(default_factory=dict)  # kind of work -> relative error of forecasts

    @property
    def is_host(self) -> bool:
        """Whether its ranks exchange through gloo and allocate from the system."""
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
    """Nothing to calibrate by, or a file that is no calibration. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Of the totals of steps that were held out, as shares; None where too little of a kind was seen."""

    generating: AtLeastZero | None = None
    scoring: AtLeastZero | None = None
    training: AtLeastZero | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """What was measured: a run, or the part of a probe with one model."""

    name: Text
    parameters: Index
    layers: Index
    hidden: Index
    prompt_tokens: AtLeastZero  # in the mean
    response_tokens: AtLeastZero
    longest: Index  # tokens of the longest sample
    slots: Count
    generating: Index = 0  # pieces of work of a run, as of the kinds below
    scoring: Index = 0
    training: Index = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibration.yaml` holds."""

    measured: Annotated[str, one_of("runs", "probe")]
    device: Text
    count: Count  # devices that were at work at the same time; cores of a machine without GPUs
    rlfuse: Text
    hardware: Coefficients
    errors: Errors
    held_out: Text
    fitted_on: tuple[Source, ...]
    not_measured: tuple[Text, ...] = ()
    product_flops: Positive | None = None
    """Of matrix products alone, and of copies alone below: by whose ratios to another device's `scaled` goes."""
    copy_bytes_per_s: Positive | None = None

    def as_hardware(self) -> Hardware:
        """Return the device, with links that cost nothing until the caller sets them."""
        errors = {kind: error for kind, error in asdict(self.errors).items() if error is not None}
        return Hardware(**asdict(self.hardware), errors=errors)


def rounded_coefficients(hardware: Hardware) -> Coefficients:
    """Return the measured numbers for a file, to six digits."""
    given = {entry.name: getattr(hardware, entry.name) for entry in fields(Coefficients)}
    known = {name: float(f"{each:.6g}") for name, each in given.items() if each is not None}
    return Coefficients(**known | {"decode_overlaps": hardware.decode_overlaps})


def write(calibration: Calibration, path: Path) -> None:
    """Write it as YAML. NotWritable where no file can be made there."""
    write_atomically(path, yaml.safe_dump(_plain(asdict(calibration)), sort_keys=False, width=100))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each not in (None, inf)}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def read_calibration_file(path: Path) -> Calibration:
    """Raises CalibrationError, naming file, line, field, value and what it may be."""
    return read_yaml(path, Calibration, CalibrationError, "`rlfuse calibrate` writes such a file")


def read_calibration(path: Path) -> Hardware:
    """Return `as_hardware` of a calibration file."""
    return read_calibration_file(path).as_hardware()
