"""Read a cluster file, which describes the machines that `rlfuse plan` plans for."""

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
"""Highest published MFU in training: DistTrain (arXiv 2408.04275), a 72B model."""
MAX_EXPERT_UTILIZATION = 0.493  # the same for mixture-of-experts models: MoE Parallel Folding (arXiv 2504.14960)
UNCALIBRATED_ERRORS = dict.fromkeys(KINDS, 0.3)  # relative error assumed without a calibration
LAYER_S = 1e-4
"""Seconds to launch the kernels of a layer's forward pass on a GPU: an assumption; a calibration measures it."""
DECODE_STEP_S = 2e-3  # scheduling and sampling of a decoding step on a GPU; assumed likewise
DEFAULT_WITHIN_BYTES_PER_S = 200e9  # if neither the cluster file nor a calibration gives it
MEMORY_BANDWIDTH_GBS = {"cuda": 2000.0, "cpu": 20.0}  # default of Cluster.memory_bandwidth_gbs
Share = Annotated[float, number(above=True, most=1)]


class ClusterError(InputError):
    """Invalid cluster file; the message has a line for each problem."""


@dataclass(frozen=True, slots=True)
class LinkSpecs:
    """Full-duplex bandwidth and latency of a device's links."""

    within_gbs: Positive | None = None
    """GB/s between devices of a node (NVLink 3: 300, PCIe 4: 25); default: the calibration's, or 200."""
    between_gbs: Positive = 25.0
    """GB/s per device between nodes while all devices of the node send; 200 Gb/s per device is 25."""
    within_us: AtLeastZero = 10.0
    """Latency within a node in microseconds."""
    between_us: AtLeastZero = 25.0
    """Latency between nodes in microseconds."""
    host_gbs: Positive = 20.0
    """GB/s between a device and its host's memory."""
    measured: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """File written by `rlfuse calibrate --links`, relative to this file. `between_gbs` is then the bandwidth of the
    fastest pair of nodes, other pairs are scaled in proportion, and plans choose an order of the nodes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that differ from the others; omitted fields default to the values of the cluster."""

    nodes: Count
    devices_per_node: Count | None = None
    device_memory_gb: Positive | None = None
    peak_tflops: Positive | None = None
    """Scales scoring, training and prefill on these nodes by its ratio to the value of the cluster."""
    memory_bandwidth_gbs: Positive | None = None
    """Scales decoding on these nodes by its ratio to the value of the cluster."""


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    speed: NodeSpeed
    memory_gb: float
    devices: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines to plan for. A run uses the same number of devices on each of its nodes, and the smallest device
    memory among them is the limit. A device achieves `peak_tflops` x `utilization` (MFU) in scoring and training."""

    nodes: Count
    devices_per_node: Count
    device_memory_gb: Positive
    """Memory of a device in GiB; with `device: cpu`, memory per slot."""
    peak_tflops: Positive | None = None
    """Dense peak TFLOP/s of a device in the job's precision, from its data sheet; required without `calibration`. With
    a calibration it is used only for the ratios of groups and a plausibility check."""
    utilization: Annotated[float, number(above=True, most=MAX_UTILIZATION)] = 0.4
    """MFU: share of the peak that scoring and training achieve."""
    memory_bandwidth_gbs: Positive | None = None
    """Memory bandwidth of a device in GB/s; default: 2000 (`device: cpu`: 20)."""
    memory_margin: Annotated[float, number(most=0.5)] = 0.05
    """Share of device memory that plans leave free, since memory estimates are accurate to a few percent."""
    host_memory_gb: Positive | None = None
    """Host memory of a node in GiB for state offloaded from its GPUs; default: unlimited. `memory_margin` applies."""
    device: Annotated[str, one_of("cuda", "cpu")] = "cuda"
    links: LinkSpecs = field(default_factory=LinkSpecs)
    calibration: Annotated[str, Schema(type="string", minLength=1)] | None = None
    """File written by `rlfuse calibrate`, relative to the working folder. It replaces `utilization` and
    `memory_bandwidth_gbs`. For a calibration of another device, the two ratios below scale it."""
    product_ratio: Positive | None = None
    """`product_flops` of this device over that of the calibrated device, both measured with --probe."""
    copy_ratio: Positive | None = None
    """`copy_bytes_per_s` of this device over that of the calibrated device, both measured with --probe."""
    groups: tuple[Group, ...] = ()
    """Those of the `nodes` with other devices, or another number of devices, than the rest."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ClusterError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.peak_tflops is None and self.calibration is None:
            yield "peak_tflops, calibration: neither is given; set one of them"
        ratios = [self.product_ratio, self.copy_ratio]
        if any(ratios) and (self.calibration is None or not all(ratios)):
            yield "product_ratio, copy_ratio: they scale a calibration to another device; set both, and calibration"
        for name in ("peak_tflops", "memory_bandwidth_gbs"):
            if getattr(self, name) is None and any(getattr(group, name) for group in self.groups):
                yield f"groups: {name} of a group is relative to {name} of the cluster; set {name} of the cluster too"
        if (count := sum(group.nodes for group in self.groups)) > self.nodes:
            yield f"groups have {count} nodes, but nodes={self.nodes}; raise nodes, or remove nodes from the groups"

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
        ungrouped = self.nodes - sum(group.nodes for group in self.groups)
        found = [_Node(NodeSpeed(), self.device_memory_gb, self.devices_per_node)] * ungrouped
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
        """Yield an error for each resource that the job needs and the cluster does not have."""
        nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
        if each > max(self.sizes):
            most = f"the cluster file has devices_per_node={max(self.sizes)}"
            yield f"trainer.n_gpus_per_node={each}: {most}; change one of the two"
        elif nodes > (there := self.nodes_with(each)):
            least = f" with {each} devices" if there < self.nodes else ""
            yield f"trainer.nnodes={nodes}: the cluster file has nodes={there}{least}; change one of the two"

    def budget(self, config: Config) -> Budget:
        """Return the usable memory of a device and of a host: the smallest among the nodes that the plan uses."""
        smallest = min(node.memory_gb for node in self._used(config))
        taken = (1 - self.memory_margin) * GIB
        host = None if self.host_memory_gb is None else int(self.host_memory_gb * taken)
        return Budget(self.device, int(smallest * taken), host)

    def speeds(self, config: Config) -> tuple[NodeSpeed, ...]:
        """Return the relative speed of each node that a plan uses, fastest first; empty without groups."""
        return tuple(node.speed for node in self._used(config)) if self.groups else ()

    def throughput_note(self) -> str:
        if self.calibration is not None:
            return f"compute speed from calibration={self.calibration}"
        done = self.peak_tflops * self.utilization
        return (
            f"a device achieves {done:g} TFLOP/s in scoring and training (peak_tflops={self.peak_tflops:g} x "
            f"utilization={self.utilization:g})"
        )

    def hardware(self, experts: bool = False) -> Hardware:
        """Return the speeds of a device and its links; `experts`: for a mixture-of-experts model. Raises
        CalibrationError, and ClusterError for an implausible measured speed."""
        most, given = MAX_EXPERT_UTILIZATION if experts else MAX_UTILIZATION, self.links
        between, wait = self._between()
        measured = None if self.calibration is None else self._measured(most)
        measured_within = measured.sent_bytes_per_s if measured else None
        within = given.within_gbs * 1e9 if given.within_gbs else measured_within or DEFAULT_WITHIN_BYTES_PER_S
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
        """Return the measured links between all nodes, or None. Raises LinksError, and ClusterError if the number of
        nodes differs."""
        if self.links.measured is None:
            return None
        found = read_links(Path(self.links.measured))
        if len(found.nodes) != self.nodes:
            raise ClusterError(
                f"links.measured={self.links.measured} has {len(found.nodes)} nodes, but nodes={self.nodes}; measure "
                "the nodes that you plan for"
            )
        return found.scaled(self.links.between_gbs * 1e9)

    def _between(self) -> tuple[float, float]:
        """Return bytes per second and latency between nodes: if measured, of the slowest link of the best ring."""
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

        found = read_calibration(Path(self.calibration)).as_hardware()
        if self.product_ratio is not None:
            found = scaled(found, self.product_ratio, self.copy_ratio)
        if self.peak_tflops is not None and found.train_flops > most * self.peak_tflops * 1e12:
            share = found.train_flops / self.peak_tflops / 1e12
            raise ClusterError(
                f"calibration={self.calibration}: training at {found.train_flops / 1e12:,.4g} TFLOP/s is {share:.0%} "
                f"of peak_tflops={self.peak_tflops:g}, above the highest published MFU of {most:.1%}. If the "
                "calibrated device is a faster one, set product_ratio and copy_ratio; otherwise calibrate with larger "
                "models"
            )
        return found


def read_cluster(path: Path) -> Cluster:
    """Read and validate a cluster file. Raises ClusterError, naming the file and each invalid field."""
    found = read_yaml(path, Cluster, ClusterError, "give a cluster file", "--cluster ")
    if found.links.measured is None:
        return found
    return replace(found, links=replace(found.links, measured=str(path.parent / found.links.measured)))
