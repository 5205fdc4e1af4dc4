"""Read a cluster file: the machines that `rlfuse plan` plans for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from rlfuse.config.input_files import AtLeastZero, Count, InputError, Positive, Schema, number, one_of, read_yaml
from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import GIB, Budget
from rlfuse.tools.planning.hardware import KINDS, Hardware, Links, NodeSpeed
from rlfuse.tools.planning.node_order import NodeLinks, NodeTraffic, best_order, read_links

MAX_UTILIZATION = 0.547
"""Of a device's peak, in training: what DistTrain (arXiv 2408.04275) measured of a 72B model, the most published."""
MAX_EXPERT_UTILIZATION = 0.493  # of mixtures of experts: MoE Parallel Folding (arXiv 2504.14960), likewise
UNCALIBRATED_ERRORS = dict.fromkeys(KINDS, 0.3)  # assumed relative error of each kind of work without a calibration
LAYER_S = 1e-4
"""Until the kernels of a layer's forward pass have been started, on a GPU. An allowance; a calibration measures it."""
DECODE_STEP_S = 2e-3  # of a decoding step on a GPU, for scheduling and sampling; likewise
DEFAULT_WITHIN_BYTES_PER_S = (
    200e9  # bytes per second between devices of a node, where neither the file nor a calibration says
)
MEMORY_BANDWIDTH_GBS = {"cuda": 2000.0, "cpu": 20.0}  # where neither the file nor an option gives it
Share = Annotated[float, number(above=True, most=1)]


class ClusterError(InputError):
    """A cluster file that can't be used; a line for each problem."""


@dataclass(frozen=True, slots=True)
class LinkSpecs:
    """What a device sends while it receives as much, and how long until the first byte is there."""

    within_gbs: Positive | None = None
    """GB/s between devices of a node (NVLink 3: 300, PCIe 4: 25); default: the calibration's, or 200."""
    between_gbs: Positive = 25.0
    """GB/s of a device between nodes, while all of its node send; 200 Gb/s for each device are 25."""
    within_us: AtLeastZero = 10.0
    """Microseconds."""
    between_us: AtLeastZero = 25.0
    """Microseconds."""
    host_gbs: Positive = 20.0
    """GB/s of a device from and to its host's memory."""
    measured: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """A file from `rlfuse calibrate --links`, relative to this one: `between_gbs` then belongs to the fastest pair,
    others are in proportion, and plans order the nodes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that differ from the others; a field that a group leaves out has the cluster's value."""

    nodes: Count
    devices_per_node: Count | None = None
    device_memory_gb: Positive | None = None
    peak_tflops: Positive | None = None
    """Scoring, training and prefill on these nodes are faster or slower by its ratio to the cluster's."""
    memory_bandwidth_gbs: Positive | None = None
    """Decoding on these nodes is faster or slower by its ratio to the cluster's."""


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    speed: NodeSpeed
    memory_gb: float
    devices: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines. A run uses the same number of devices on each of its nodes; of these nodes the smallest memory counts.
    Computing speed has one definition: a device achieves `utilization` of its `peak_tflops` in passes and training."""

    nodes: Count
    devices_per_node: Count
    device_memory_gb: Positive
    """GiB of a device; for `device: cpu` of a slot."""
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of a device in the job's precision, dense, as its data sheet says; required without `calibration`.
    With one, only the ratios of groups and the plausibility check use it."""
    utilization: Annotated[float, number(above=True, most=MAX_UTILIZATION)] = 0.4
    """Share of the peak that passes and training achieve (MFU)."""
    memory_bandwidth_gbs: Positive | None = None
    """GB/s that a device reads from its memory; default: 2000 (`device: cpu`: 20)."""
    memory_margin: Annotated[float, number(most=0.5)] = 0.05
    """Share of the memory that a plan leaves free, as what it needs is told to some percent."""
    host_memory_gb: Positive | None = None
    """GiB of a node's memory for what is moved off its GPUs; default: enough. `memory_margin` applies."""
    device: Annotated[str, one_of("cuda", "cpu")] = "cuda"
    links: LinkSpecs = field(default_factory=LinkSpecs)
    calibration: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """A file from `rlfuse calibrate`, relative to the working folder, that replaces `utilization` and
    `memory_bandwidth_gbs`. If it is of another device, the two ratios below scale it."""
    product_ratio: Positive | None = None
    """This device's matrix products over those of the calibrated one, as `product_flops` of two probes tell."""
    copy_ratio: Positive | None = None
    """Its copies, as `copy_bytes_per_s` of two probes tell."""
    groups: tuple[Group, ...] = ()
    """Nodes, among `nodes`, that have other devices, or another number of them, than the others."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ClusterError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.peak_tflops is None and self.calibration is None:
            yield "peak_tflops, calibration: neither is given; a device's speed is told by one of them"
        ratios = [self.product_ratio, self.copy_ratio]
        if any(ratios) and (self.calibration is None or not all(ratios)):
            yield "product_ratio, copy_ratio: need each other and a calibration, which they carry to another device"
        for name in ("peak_tflops", "memory_bandwidth_gbs"):
            if getattr(self, name) is None and any(getattr(group, name) for group in self.groups):
                yield f"groups: {name} of a group needs the cluster's own {name}, to which it is compared; add it"
        if (count := sum(group.nodes for group in self.groups)) > self.nodes:
            yield f"groups have {count} nodes: nodes={self.nodes} are all there are; raise it, or leave some out"

    @property
    def devices(self) -> int:
        return sum(node.devices for node in self._nodes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({node.devices for node in self._nodes}))

    def nodes_with(self, devices: int) -> int:
        return sum(node.devices >= devices for node in self._nodes)

    @property
    def _nodes(self) -> list[_Node]:
        alike = self.nodes - sum(group.nodes for group in self.groups)
        found = [_Node(NodeSpeed(), self.device_memory_gb, self.devices_per_node)] * alike
        for group in self.groups:
            compute = group.peak_tflops / self.peak_tflops if group.peak_tflops else 1.0
            memory = group.memory_bandwidth_gbs / self.memory_bandwidth_gbs if group.memory_bandwidth_gbs else 1.0
            memory_gb, devices = group.device_memory_gb or self.device_memory_gb, group.devices_per_node
            found += [_Node(NodeSpeed(compute, memory), memory_gb, devices or self.devices_per_node)] * group.nodes
        return sorted(found, reverse=True)

    def _used(self, config: Config) -> list[_Node]:
        enough = [node for node in self._nodes if node.devices >= config.trainer.n_gpus_per_node]
        return enough[: config.trainer.nnodes]

    def missing_for(self, config: Config) -> Iterator[str]:
        """Yield what the job needs and the cluster does not have."""
        nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
        if each > max(self.sizes):
            most = f"the cluster file has devices_per_node={max(self.sizes)}"
            yield f"trainer.n_gpus_per_node={each}: {most}; change one of the two"
        elif nodes > (there := self.nodes_with(each)):
            least = f" with {each} devices" if there < self.nodes else ""
            yield f"trainer.nnodes={nodes}: the cluster file has nodes={there}{least}; change one of the two"

    def budget(self, config: Config) -> Budget:
        """Return the usable memory of a device and of a node: the smallest that the plan uses."""
        smallest = min(node.memory_gb for node in self._used(config))
        taken = (1 - self.memory_margin) * GIB
        host = None if self.host_memory_gb is None else int(self.host_memory_gb * taken)
        return Budget(self.device, int(smallest * taken), host)

    def speeds(self, config: Config) -> tuple[NodeSpeed, ...]:
        """Return the speed of each node that a plan uses, the fastest first; empty without groups."""
        return tuple(node.speed for node in self._used(config)) if self.groups else ()

    def throughput_note(self) -> str:
        if self.calibration is not None:
            return f"computing speed as measured (calibration={self.calibration})"
        done = self.peak_tflops * self.utilization
        return (
            f"a device achieves {done:g} TFLOP/s in passes and training (peak_tflops={self.peak_tflops:g} x "
            f"utilization={self.utilization:g})"
        )

    def hardware(self, experts: bool = False) -> Hardware:
        """Return what a device and its links do; `experts`: for mixtures of experts. Raises as `read_calibration`, and
        ClusterError for a measured speed that is not plausible."""
        most, given = MAX_EXPERT_UTILIZATION if experts else MAX_UTILIZATION, self.links
        between, wait = self._between()
        measured = None if self.calibration is None else self._measured(most)
        told = measured.sent_bytes_per_s if measured else None
        within = given.within_gbs * 1e9 if given.within_gbs else told or DEFAULT_WITHIN_BYTES_PER_S
        links = Links(within, between, given.within_us * 1e-6, wait, max(self.sizes))
        if measured is not None:
            return replace(measured, links=links, host_bytes_per_s=given.host_gbs * 1e9)
        flops, gpu = self.peak_tflops * 1e12 * min(self.utilization, most), self.device == "cuda"
        return Hardware(
            flops,
            flops,
            flops,
            (self.memory_bandwidth_gbs or MEMORY_BANDWIDTH_GBS[self.device]) * 1e9,
            layer_s=LAYER_S if gpu else 0.0,
            decode_step_s=DECODE_STEP_S if gpu else 0.0,
            host_bytes_per_s=given.host_gbs * 1e9,
            links=links,
            errors=UNCALIBRATED_ERRORS,
        )

    def node_links(self) -> NodeLinks | None:
        """Return the measured links of every two nodes, if any. Raises LinksError, and ClusterError for other nodes."""
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
        """Return bytes per second and latency between nodes; if measured, of the best ring's slowest link."""
        if self.nodes == 1 or (links := self.node_links()) is None:
            return self.links.between_gbs * 1e9, self.links.between_us * 1e-6
        order = best_order(
            links, NodeTraffic(ring_bytes=1e9, ring_hops=1, stage_bytes=0.0, stage_messages=0, nodes=self.nodes)
        )
        pairs = list(zip(order, (*order[1:], order[0]), strict=True))
        return min(links.bytes_per_s[a][b] for a, b in pairs), max(links.seconds[a][b] for a, b in pairs)

    def _measured(self, most: float) -> Hardware:
        from rlfuse.tools.planning.calibration import scaled
        from rlfuse.tools.planning.hardware import read_calibration

        found = read_calibration(Path(self.calibration))
        if self.product_ratio is not None:
            found = scaled(found, self.product_ratio, self.copy_ratio)
        if self.peak_tflops is not None and found.train_flops > most * self.peak_tflops * 1e12:
            share = found.train_flops / self.peak_tflops / 1e12
            raise ClusterError(
                f"calibration={self.calibration}: training at {found.train_flops / 1e12:,.4g} TFLOP/s is {share:.0%} "
                f"of peak_tflops={self.peak_tflops:g}, more than {most:.1%}, the most that anybody published; it is of "
                "a faster device (product_ratio, copy_ratio), or its work was too small to show the speed: measure "
                "larger models"
            )
        return found


def read_cluster(path: Path) -> Cluster:
    """Raises ClusterError, naming the file and each field that is wrong."""
    found = read_yaml(path, Cluster, ClusterError, "give the file of a cluster", "--cluster ")
    if found.links.measured is None:
        return found
    return replace(found, links=replace(found.links, measured=str(path.parent / found.links.measured)))
