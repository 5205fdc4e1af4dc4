"""Sample the activity of a node and the run's processes on it, from `/proc`, psutil and NVML."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlfuse import clock
from rlfuse.cluster.watchdog import Registered, registered
from rlfuse.health.series import Sample

PROC = Path("/proc")
TICK, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
TREES_EVERY_S = 10.0  # interval between scans of all processes of the host
PROBE_EVERY_S, PROBE_S = 5.0, 0.5  # interval between network probes, and timeout of one

Counters = dict[str, float]


class Sampler:
    """Sampler of the node with this name. `probe`: (address, port) of another node, for the round-trip time."""

    def __init__(
        self,
        node: str,
        probe: tuple[str, int] | None = None,
        workers: Callable[[], list[Registered]] = registered,
        gpus: Gpus | None = None,
    ):
        self.node, self._probe, self._workers = node, probe, workers
        self._gpus = open_gpus() if gpus is None else gpus
        self._process_trees: dict[Registered, list[int]] = {}
        self._looked = self._probed = -TREES_EVERY_S
        self._at = clock.now()
        self._before: dict[int, Counters] = {}
        self._node_before: Counters = {}

    def sample(self) -> list[Sample]:
        if (now := time.monotonic()) - self._looked >= TREES_EVERY_S:
            self._looked, self._process_trees = now, process_trees(self._workers())
        before, self._at = self._at, clock.now()
        seconds = self._at - before
        if seconds <= 0:
            return []
        found = [Sample(each.where, self._at, seconds, self._worker(each, seconds)) for each in self._process_trees]
        found.append(Sample(self.node, self._at, seconds, self._node(seconds)))
        alive = {pid for pids in self._process_trees.values() for pid in pids}
        self._before = {pid: counters for pid, counters in self._before.items() if pid in alive}
        return [sample for sample in found if sample.amounts]

    def _worker(self, worker: Registered, seconds: float) -> Counters:
        used: Counters = defaultdict(float)
        for pid in self._process_trees[worker]:
            with suppress(OSError):  # it has ended
                now = process_counters(pid)
                used["memory_gb"] += now.pop("memory_gb")
                before, self._before[pid] = self._before.get(pid, {}), now
                for name in now.keys() & before.keys():
                    used[name] += max(0.0, now[name] - before[name])
        if "disk_mb" in used:
            used["disk_mb"] /= seconds
        if self._gpus is not None and worker.device:
            used |= self._gpus.read(worker.device)
        return dict(used)

    def _node(self, seconds: float) -> Counters:
        now, before = node_counters(), self._node_before
        self._node_before = now
        gone = {name: max(0.0, now[name] - before[name]) for name in now.keys() & before.keys()}
        rates = {name: gone[name] / seconds for name in RATES if name in gone}
        if gone.get("disk_operations"):
            rates["disk_latency"] = gone["disk_s"] / gone["disk_operations"]
        if self._probe and time.monotonic() - self._probed >= PROBE_EVERY_S:
            self._probed = time.monotonic()
            rates["round_trip"] = round_trip(*self._probe)
        return rates


def process_trees(workers: Sequence[Registered]) -> dict[Registered, list[int]]:
    """Return worker -> ids of its process and all of its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"]].append(process.pid)

    def below(pid: int) -> Iterable[int]:
        yield pid
        for child in children[pid]:
            if child not in own:  # a worker started by another worker counts separately
                yield from below(child)

    own = {worker.pid for worker in workers}
    return {worker: list(below(worker.pid)) for worker in workers}


def process_counters(pid: int) -> Counters:
    """Return the counters of a process since its start. Raises OSError if it has ended."""
    stat = _read(pid, "stat").rpartition(b")")[2].split()
    found = {
        "cpu": (int(stat[11]) + int(stat[12])) / TICK,
        "page_faults": float(stat[9]),
        "memory_gb": int(stat[21]) * PAGE / 2**30,
    }
    with suppress(OSError, IndexError):  # a kernel without it
        found["core_wait"] = int(_read(pid, "schedstat").split()[1]) / 1e9
    with suppress(OSError):  # another user's
        io = dict(line.split(b": ") for line in _read(pid, "io").splitlines())
        found["disk_mb"] = (int(io[b"read_bytes"]) + int(io[b"write_bytes"])) / 1e6
    return found


def _read(pid: int, name: str) -> bytes:
    with open(f"{PROC}/{pid}/{name}", "rb", 0) as file:
        return file.read()


RATES = ("memory_pressure", "io_pressure", "retransmits")  # counters reported per second


def node_counters() -> Counters:
    """Return the counters of the node since boot."""
    found: Counters = {}
    for name in ("memory", "io"):
        with suppress(OSError, ValueError):  # a kernel without them, or with them turned off
            first = (PROC / "pressure" / name).read_text().splitlines()[0]
            found[f"{name}_pressure"] = int(first.rpartition("total=")[2]) / 1e6
    with suppress(OSError, ValueError):
        names, values = [line for line in (PROC / "net" / "snmp").read_text().splitlines() if line.startswith("Tcp:")]
        found["retransmits"] = float(dict(zip(names.split(), values.split(), strict=True))["RetransSegs"])
    with suppress(OSError, ValueError, RuntimeError):  # NotImplementedError in some containers
        if (disks := psutil.disk_io_counters()) is not None:
            found["disk_s"] = (disks.read_time + disks.write_time) / 1e3
            found["disk_operations"] = float(disks.read_count + disks.write_count)
    return found


def round_trip(address: str, port: int) -> float:
    """Return the seconds to open a connection; PROBE_S on failure."""
    began = time.perf_counter()
    with suppress(OSError):
        socket.create_connection((address, port), PROBE_S).close()
        return time.perf_counter() - began
    return PROBE_S


class Gpus:
    """Reader of GPU signals. `nvml`: the initialised module pynvml."""

    def __init__(self, nvml: Any):
        self._nvml = nvml
        self._handles: dict[str, Any] = {}

    def read(self, device: str) -> dict[str, float]:
        """Return the signals of a device, named as in CUDA_VISIBLE_DEVICES: a number or `GPU-...`."""
        nvml, found = self._nvml, {}
        with suppress(nvml.NVMLError):
            handle = self._handle(device)
            readers: dict[str, Callable[[], float]] = {
                "gpu_use": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                "gpu_clock": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            }
            for name, read in readers.items():
                with suppress(nvml.NVMLError):  # not supported by this device
                    found[name] = read()
        return found

    def _handle(self, device: str) -> Any:
        if device not in self._handles:
            if device.isdecimal():
                self._handles[device] = self._nvml.nvmlDeviceGetHandleByIndex(int(device))
            else:
                self._handles[device] = self._nvml.nvmlDeviceGetHandleByUUID(device)
        return self._handles[device]


def open_gpus() -> Gpus | None:
    """Return a reader of GPU signals; None without pynvml or a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Gpus(pynvml)
