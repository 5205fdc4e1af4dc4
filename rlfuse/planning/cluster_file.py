"""A cluster file: which machines there are and what they do, for `rlfuse plan --search`.

Role: `read_cluster` turns YAML into a `Cluster`; the search reads nothing else of the machines. Every field is checked
by its schema; what a number is of stands at the field. Pure but for reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import yaml

from rlfuse.config.input_files import AtLeastZero, Count, InputError, Positive, Schema, number, one_of, read
from rlfuse.planning.hardware import KINDS, Hardware, Links
from rlfuse.planning.memory import GIB, Budget

MOST_UTILIZATION = 0.547
"""Of a device's peak, in training: what DistTrain (arXiv 2408.04275) measured of a 72B model, the most published."""
UNMEASURED = 0.3
"""How far a forecast may be off where nothing was measured: an allowance, which `rlfuse calibrate` replaces."""
LAYER_S = 1e-4
"""Until the kernels of a layer's forward pass have been started, on a GPU. An allowance; a calibration measures it."""
DECODE_STEP_S = 2e-3
"""Of a decoding step, for scheduling and sampling, on a GPU. Likewise."""
Share = Annotated[float, number(above=True, most=1)]


class ClusterError(InputError):
    """A cluster file that can't be used; a line for each problem."""


@dataclass(frozen=True, slots=True)
class LinksGiven:
    """What a device sends while it receives as much, and how long until the first byte is there."""

    within_gbs: Positive = 200.0
    """GB/s between devices of a node; NVLink 3 of an A100: 300, PCIe 4: 25."""
    between_gbs: Positive = 25.0
    """GB/s of a device between nodes, while all of its node send; 200 Gb/s for each device are 25."""
    within_us: AtLeastZero = 10.0
    """Microseconds."""
    between_us: AtLeastZero = 25.0
    """Microseconds."""
    host_gbs: Positive = 20.0
    """GB/s of a device from and to its host's memory."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are unlike the others."""

    nodes: Count
    tflops: Positive
    """As the cluster's."""
    device_memory_gb: Positive


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines. A run has a slot on every device that it uses; where groups differ, the smallest memory counts."""

    nodes: Count
    devices_per_node: Count
    device_memory_gb: Positive
    """GiB of a device; for `device: cpu` of a slot."""
    tflops: Positive | None = None
    """Peak TFLOP/s of a device in the job's precision, dense, as its data sheet says; needed without `calibration`."""
    utilization: Annotated[float, number(above=True, most=MOST_UTILIZATION)] = 0.4
    """Share of the peak that passes and training reach (MFU)."""
    memory_bandwidth_gbs: Positive = 2000.0
    """GB/s that a device reads from its memory."""
    memory_margin: Annotated[float, number(most=0.5)] = 0.05
    """Share of the memory that a plan leaves free, as what it needs is told to some percent."""
    device: Annotated[str, one_of("cuda", "cpu")] = "cuda"
    links: LinksGiven = field(default_factory=LinksGiven)
    calibration: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """A file that `rlfuse calibrate` wrote on such a device, in place of `tflops`."""
    groups: tuple[Group, ...] = ()
    """Nodes, among `nodes`, that have slower devices or less memory than the others."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ClusterError(*problems)

    def _problems(self) -> Iterator[str]:
        if (self.tflops is None) == (self.calibration is None):
            given = "both are given" if self.tflops else "neither is given"
            yield f"tflops, calibration: {given}; a device's speed is told by one of them"
        if self.groups and self.tflops is None:
            yield "groups: need tflops of the other nodes, which theirs are held against"
        if (count := sum(group.nodes for group in self.groups)) > self.nodes:
            yield f"groups have {count} nodes: nodes={self.nodes} are all there are; raise it, or leave some out"

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def budget(self) -> Budget:
        """What a plan may take of a device: of the smallest."""
        smallest = min([self.device_memory_gb, *(group.device_memory_gb for group in self.groups)])
        return Budget(self.device, int(smallest * (1 - self.memory_margin) * GIB))

    def speeds(self, nodes: int) -> tuple[float, ...]:
        """Of each node that is used, the fastest first, relative to the cluster's own; empty where all are alike."""
        if not self.groups:
            return ()
        alike = self.nodes - sum(group.nodes for group in self.groups)
        each = [1.0] * alike + [group.tflops / self.tflops for group in self.groups for _ in range(group.nodes)]
        return tuple(sorted(each, reverse=True)[:nodes])

    def hardware(self) -> Hardware:
        """What a device and its links do. Raises as `read_calibration` does."""
        given = self.links
        links = Links(
            given.within_gbs * 1e9,
            given.between_gbs * 1e9,
            given.within_us * 1e-6,
            given.between_us * 1e-6,
            self.devices_per_node,
        )
        if self.calibration is not None:
            from rlfuse.planning.calibration import read_calibration

            return replace(read_calibration(Path(self.calibration)), links=links, host_bytes_per_s=given.host_gbs * 1e9)
        flops, gpu = self.tflops * 1e12 * self.utilization, self.device == "cuda"
        return Hardware(
            flops,
            flops,
            flops,
            self.memory_bandwidth_gbs * 1e9,
            layer_s=LAYER_S if gpu else 0.0,
            decode_step_s=DECODE_STEP_S if gpu else 0.0,
            host_bytes_per_s=given.host_gbs * 1e9,
            links=links,
            errors=dict.fromkeys(KINDS, UNMEASURED),
        )


def read_cluster(path: Path) -> Cluster:
    """Raises ClusterError, naming the file and each field that is wrong."""
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ClusterError(f"--cluster {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterError(f"--cluster {path}: can't be read as YAML: {error}") from error
    try:
        return read(Cluster, data, ClusterError)
    except ClusterError as error:
        raise ClusterError(*(f"--cluster {path}: {problem}" for problem in error.problems)) from None
