"""The signals that are compared between peers, in order of priority. Values are compared by logarithms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SLOWNESS = "slowness"


@dataclass(frozen=True, slots=True)
class Signal:
    """One number of every worker of a role (or of every node) in each window."""

    name: str
    description: str  # with unit, for messages
    per: Literal["work", "busy", "time"]  # divided by expected work, or averaged over busy or all seconds
    min_distance: float  # smallest meaningful distance, times `detection.SIMILARITY`
    unit: float = 0.0  # 0: compared by ratio
    worse: int = 1  # 1: high is bad, -1: low is
    from_start: bool = False  # compared by absolute value, not by change since the first windows
    factor: float = 1.0  # to the unit of messages

    def compared(self, value: float) -> float:
        """Return the value on the scale of distances, where high is bad."""
        return self.worse * math.log(value + self.unit)

    def value(self, compared: float) -> float:
        return math.exp(self.worse * compared) - self.unit

    def shown(self, value: float) -> str:
        return f"{value * self.factor:.3g}"


SIGNALS = {
    signal.name: signal
    for signal in (
        Signal(SLOWNESS, "seconds per expected second of work", "work", 0.05, from_start=True),
        Signal("gpu_clock", "MHz of the GPU's clock", "busy", 0.05, worse=-1),
        Signal("gpu_power", "W of the GPU", "busy", 0.1, worse=-1),
        Signal("gpu_use", "% of the GPU in use", "busy", 0.1, worse=-1),
        Signal("cpu", "CPU seconds per expected second of work", "work", 0.1),
        Signal("core_wait", "seconds waiting for a core per expected second of work", "work", 0.2, unit=0.1),
        Signal("page_faults", "page faults from disk per expected second of work", "work", 0.25, unit=10.0),
        Signal("memory_pressure", "% of the time stalled for memory", "time", 0.15, unit=0.05, factor=100),
        Signal("io_pressure", "% of the time stalled for disks", "time", 0.15, unit=0.05, factor=100),
        Signal("disk_latency", "ms for a read or write of the disks", "time", 0.15, unit=2e-3, factor=1e3),
        Signal("retransmits", "TCP segments sent again a second", "time", 0.15, unit=10.0),
        Signal("round_trip", "ms to the driver's node and back", "time", 0.15, unit=5e-4, factor=1e3),
    )
}
LOGGED = {"memory_gb": "GiB in memory of a worker with its children", "disk_mb": "MB/s that it reads and writes"}
"""Additional samples that are only logged: healthy values differ too much (rank 0 gathers checkpoints)."""
