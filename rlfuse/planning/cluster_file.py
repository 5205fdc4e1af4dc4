"""A cluster file: which machines there are and what they do, for `rlfuse plan --search`.

Role: `read_cluster` turns YAML into a `Cluster`; the search reads nothing else of the machines. Every field is checked
by its schema; what a number is of stands at the field. Pure but for reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from rlfuse.config.input_files import AtLeastZero, Count, InputError, Positive, Schema, number, one_of, read
from rlfuse.config.schema import Config
from rlfuse.planning.hardware import KINDS, Hardware, Links
from rlfuse.planning.measured_links import read_links
from rlfuse.planning.memory import GIB, Budget
from rlfuse.planning.node_order import Exchanged, NodeLinks, best_order
from rlfuse.planning.presets import PRESETS

MOST_UTILIZATION = 0.547
"""Of a device's peak, in training: what DistTrain (arXiv 2408.04275) measured of a 72B model, the most published."""
MOST_OF_EXPERTS = 0.493
"""Of mixtures of experts: MoE Parallel Folding (arXiv 2504.14960), likewise."""
UNMEASURED = dict.fromkeys(KINDS, 0.3)
"""How far a forecast of each kind of work may be off, as a share, where nothing was measured: an allowance, which
`rlfuse calibrate` replaces."""
LAYER_S = 1e-4
"""Until the kernels of a layer's forward pass have been started, on a GPU. An allowance; a calibration measures it."""
DECODE_STEP_S = 2e-3
"""Of a decoding step, for scheduling and sampling, on a GPU. Likewise."""
WITHIN = 200e9
"""Bytes per second between devices of a node, where neither the file nor a calibration says."""
Share = Annotated[float, number(above=True, most=1)]


class ClusterError(InputError):
    """A cluster file that can't be used; a line for each problem."""


@dataclass(frozen=True, slots=True)
class LinksGiven:
    """What a device sends while it receives as much, and how long until the first byte is there."""

    within_gbs: Positive | None = None
    """GB/s between devices of a node; NVLink 3 of an A100: 300, PCIe 4: 25. Without it what the calibration's runs tell
    of these, or 200."""
    between_gbs: Positive = 25.0
    """GB/s of a device between nodes, while all of its node send; 200 Gb/s for each device are 25."""
    within_us: AtLeastZero = 10.0
    """Microseconds."""
    between_us: AtLeastZero = 25.0
    """Microseconds."""
    host_gbs: Positive = 20.0
    """GB/s of a device from and to its host's memory."""
    measured: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """A file that `rlfuse calibrate --links` wrote of these nodes: `between_gbs` is then of the fastest pair, others in
    proportion, and plans put the nodes in order. Relative to the cluster file."""


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
    """Peak TFLOP/s of a device in the job's precision, dense, as its data sheet says; needed without `calibration`.
    With one no speed follows from it: other groups, and what is plausible, are held against it."""
    utilization: Annotated[float, number(above=True, most=MOST_UTILIZATION)] = 0.4
    """Share of the peak that passes and training reach (MFU)."""
    memory_bandwidth_gbs: Positive = 2000.0
    """GB/s that a device reads from its memory."""
    memory_margin: Annotated[float, number(most=0.5)] = 0.05
    """Share of the memory that a plan leaves free, as what it needs is told to some percent."""
    host_memory_gb: Positive | None = None
    """GiB of a node's own memory, where models and optimizers are pinned while they are off its GPUs; without it they
    are taken to have room. `memory_margin` of it is left free, too."""
    device: Annotated[str, one_of("cuda", "cpu")] = "cuda"
    links: LinksGiven = field(default_factory=LinksGiven)
    calibration: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """A file that `rlfuse calibrate` wrote, in place of `utilization` and `memory_bandwidth_gbs`; relative to the
    working folder. On another kind of device than this one's, the two ratios below say how much faster this one is."""
    product_ratio: Positive | None = None
    """This device's matrix products over those of the calibrated one, as `product_flops` of two probes tell."""
    copy_ratio: Positive | None = None
    """Its copies, as `copy_bytes_per_s` of two probes tell."""
    groups: tuple[Group, ...] = ()
    """Nodes, among `nodes`, that have slower devices or less memory than the others."""
    preset: Annotated[str, one_of(*PRESETS)] | None = None
    """A kind of device whose data sheet gives every field that the file leaves out."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ClusterError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.tflops is None and self.calibration is None:
            yield "tflops, calibration: neither is given; a device's speed is told by one of them"
        ratios = [self.product_ratio, self.copy_ratio]
        if any(ratios) and (self.calibration is None or not all(ratios)):
            yield "product_ratio, copy_ratio: need each other and a calibration, which they carry to another device"
        if self.utilization > (most := self._most(experts=False)):
            yield f"utilization={self.utilization:g}: nobody published more than {most:g} of {self.preset}; lower it"
        if self.groups and self.tflops is None:
            yield "groups: need tflops of the other nodes, which theirs are held against"
        if (count := sum(group.nodes for group in self.groups)) > self.nodes:
            yield f"groups have {count} nodes: nodes={self.nodes} are all there are; raise it, or leave some out"

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def _most(self, experts: bool) -> float:
        """Of the peak, in training: what somebody published."""
        known = PRESETS[self.preset].most_utilization if self.preset else None
        return min(known or 1, MOST_OF_EXPERTS if experts else MOST_UTILIZATION)

    def _used(self, nodes: int) -> list[tuple[float, float]]:
        """Speed of each node, relative to the cluster's own, and memory; the fastest first, of equals the larger."""
        groups = [(group.tflops / self.tflops, group) for group in self.groups]
        alike = self.nodes - sum(group.nodes for group in self.groups)
        found = [(1.0, self.device_memory_gb)] * alike
        found += [(speed, group.device_memory_gb) for speed, group in groups for _ in range(group.nodes)]
        return sorted(found, reverse=True)[:nodes]

    def lacks(self, config: Config) -> Iterator[str]:
        """What the job asks for that is not there."""
        have = {"nnodes": ("nodes", self.nodes), "n_gpus_per_node": ("devices_per_node", self.devices_per_node)}
        for key, (name, most) in have.items():
            if (asked := getattr(config.trainer, key)) > most:
                yield f"trainer.{key}={asked}: the cluster file has {name}={most}; mend one of the two"

    def budget(self, nodes: int | None = None) -> Budget:
        """What a plan may take of a device: of the smallest on so many nodes, or on all."""
        smallest = min(memory for _, memory in self._used(nodes or self.nodes))
        taken = (1 - self.memory_margin) * GIB
        host = None if self.host_memory_gb is None else int(self.host_memory_gb * taken)
        return Budget(self.device, int(smallest * taken), host)

    def speeds(self, nodes: int) -> tuple[float, ...]:
        """Of each node that is used, the fastest first; empty where all are alike."""
        return tuple(speed for speed, _ in self._used(nodes)) if self.groups else ()

    def hardware(self, experts: bool = False) -> Hardware:
        """What a device and its links do; `experts`: in training a mixture of them. Raises as `read_calibration` does,
        and ClusterError where what was measured is more than anybody published."""
        most, given = self._most(experts), self.links
        between, wait = self._between()
        measured = None if self.calibration is None else self._measured(most)
        told = measured.sent_bytes_per_s if measured else None
        within = given.within_gbs * 1e9 if given.within_gbs else told or WITHIN
        links = Links(within, between, given.within_us * 1e-6, wait, self.devices_per_node)
        if measured is not None:
            return replace(measured, links=links, host_bytes_per_s=given.host_gbs * 1e9)
        flops, gpu = self.tflops * 1e12 * min(self.utilization, most), self.device == "cuda"
        return Hardware(
            flops,
            flops,
            flops,
            self.memory_bandwidth_gbs * 1e9,
            layer_s=LAYER_S if gpu else 0.0,
            decode_step_s=DECODE_STEP_S if gpu else 0.0,
            host_bytes_per_s=given.host_gbs * 1e9,
            links=links,
            errors=UNMEASURED,
        )

    def node_links(self) -> NodeLinks | None:
        """Between every two nodes, where they were measured. Raises LinksError, and ClusterError for other nodes."""
        if self.links.measured is None:
            return None
        found = read_links(Path(self.links.measured))
        if len(found.nodes) != self.nodes:
            raise ClusterError(
                f"links.measured={self.links.measured}: of {len(found.nodes)} nodes, nodes={self.nodes}; measure those "
                "that are planned for"
            )
        return found.scaled(self.links.between_gbs * 1e9)

    def _between(self) -> tuple[float, float]:
        """Bytes per second and seconds between nodes; of measured ones on the best ring's slowest link."""
        if self.nodes == 1 or (links := self.node_links()) is None:
            return self.links.between_gbs * 1e9, self.links.between_us * 1e-6
        order = best_order(links, Exchanged(ring=1e9, ring_hops=1, handed=0.0, hand_overs=0, nodes=self.nodes))
        pairs = list(zip(order, (*order[1:], order[0]), strict=True))
        return min(links.bytes_per_s[a][b] for a, b in pairs), max(links.seconds[a][b] for a, b in pairs)

    def _measured(self, most: float) -> Hardware:
        from rlfuse.planning.calibration import scaled
        from rlfuse.planning.calibration_file import read_calibration

        found = read_calibration(Path(self.calibration))
        if self.product_ratio is not None:
            found = scaled(found, self.product_ratio, self.copy_ratio)
        if self.tflops is not None and found.train_flops > most * self.tflops * 1e12:
            share = found.train_flops / self.tflops / 1e12
            raise ClusterError(
                f"calibration={self.calibration}: training at {found.train_flops / 1e12:,.4g} TFLOP/s is {share:.0%} "
                f"of tflops={self.tflops:g}, more than {most:.1%}, the most that anybody published; it is of a faster "
                "device (product_ratio, copy_ratio), or its work was too small to show the speed: measure larger models"
            )
        return found


def read_cluster(path: Path) -> Cluster:
    """Raises ClusterError, naming the file and each field that is wrong."""
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ClusterError(f"--cluster {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterError(f"--cluster {path}: can't be read as YAML: {error}") from error
    try:
        found = read(Cluster, _filled(data), ClusterError)
        if found.links.measured is None:
            return found
        return replace(found, links=replace(found.links, measured=str(path.parent / found.links.measured)))
    except ClusterError as error:
        raise ClusterError(*(f"--cluster {path}: {problem}" for problem in error.problems)) from None


def _filled(data: Any) -> Any:
    """With what the preset that it names says; what can't be used stays for `read` to refuse."""
    if not isinstance(data, dict) or not isinstance(data.get("preset"), str) or data["preset"] not in PRESETS:
        return data
    known = PRESETS[data["preset"]].fields
    given = data.get("links", {})
    return {**known, **data, "links": {**known["links"], **given} if isinstance(given, dict) else given}
