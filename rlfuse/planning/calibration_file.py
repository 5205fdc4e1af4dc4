"""Write and read `calibration.yaml`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

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
from rlfuse.files import write_whole
from rlfuse.planning.hardware import Hardware

Text = Annotated[str, Schema(type="string", minLength=1)]


class CalibrationError(InputError):
    """Nothing to calibrate by, or a file that is no calibration. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The fields of `Hardware` of the same names."""

    pass_flops: Positive
    train_flops: Positive
    decode_flops: Positive
    bytes_per_s: Positive
    pass_call_s: AtLeastZero = 0.0
    train_call_s: AtLeastZero = 0.0
    decode_step_s: AtLeastZero = 0.0
    decode_sequence_s: AtLeastZero = 0.0
    decode_attention_s: AtLeastZero = 0.0
    decode_overlaps: Annotated[bool, FLAG] = True
    layer_s: AtLeastZero = 0.0
    optimizer_s: AtLeastZero = 0.0
    gather_s: AtLeastZero = 0.0
    step_s: AtLeastZero = 0.0
    crowding: AtLeastZero = 0.0
    hidden_bytes_per_s: Positive | None = None
    update_bytes_per_s: Positive | None = None
    copied_bytes_per_s: Positive | None = None
    sent_bytes_per_s: Positive | None = None
    host_bytes_per_s: Positive | None = None  # none of these where it was not measured


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
        """With links that cost nothing: the caller knows them."""
        given = {name: value for name, value in asdict(self.hardware).items() if value is not None}
        errors = {kind: error for kind, error in asdict(self.errors).items() if error is not None}
        return Hardware(**given, errors=errors)


def coefficients_of(hardware: Hardware) -> Coefficients:
    """Numbers for a file, to six digits; None for what was not measured."""
    given = {entry.name: getattr(hardware, entry.name) for entry in fields(Coefficients)}
    known = {name: float(f"{each:.6g}") for name, each in given.items() if each is not None and math.isfinite(each)}
    return Coefficients(**known | {"decode_overlaps": hardware.decode_overlaps})


def write(calibration: Calibration, path: Path) -> None:
    """Write it as YAML. NotWritable where no file can be made there."""
    write_whole(path, yaml.safe_dump(_plain(asdict(calibration)), sort_keys=False, width=100))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def read_file(path: Path) -> Calibration:
    """Raises CalibrationError, naming file, line, field, value and what it may be."""
    return read_yaml(path, Calibration, CalibrationError, "`rlfuse calibrate` writes such a file")


def read_calibration(path: Path) -> Hardware:
    """The device, whose links cost nothing until the caller sets them."""
    return read_file(path).as_hardware()
