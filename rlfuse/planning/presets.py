"""Devices that nobody here measured: fields of a cluster file as data sheets have them, and where each is from.

Role: `cluster_file` fills in what a file with `preset: mi250x` does not say. Pure.
Invariant: what stands in the file counts, whatever stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """One kind of device, in the nodes that it is known for."""

    fields: Mapping[str, Any]
    source: str
    most_utilization: float | None = None
    """Of its peak, in training: the most published of this device; None: nobody published one."""


PRESETS = {
    "mi250x": Preset(
        {
            "devices_per_node": 8,
            "device_memory_gb": 64,
            "host_memory_gb": 512,
            "peak_tflops": 191.5,
            "utilization": 0.361,
            "memory_bandwidth_gbs": 1600,
            "links": {"within_gbs": 50, "between_gbs": 12.5, "host_gbs": 36},
        },
        "a die of an AMD Instinct MI250X, two to a card, as in Frontier: peak and memory of AMD's data sheet, halved; "
        "links of OLCF's user guide (50 to 200 GB/s between dies, of which a ring has the least; 100 GB/s of a node); "
        "utilization of 175B parameters by Frontier (arXiv 2312.12705): 38.4 / 36.1 / 32.0 % of 22B / 175B / 1T",
        0.384,
    ),
    "ascend910": Preset(
        {
            "devices_per_node": 8,
            "device_memory_gb": 32,
            "peak_tflops": 256,
            "memory_bandwidth_gbs": 1200,
            "links": {"within_gbs": 30, "between_gbs": 12.5},
        },
        "a Huawei Ascend 910, as PanGu-alpha (arXiv 2104.12369) trained on: peak in float16, four stacks of HBM2, one "
        "HCCS port of 240 Gb/s and one of 100 Gb/s Ethernet, by Huawei at Hot Chips 2019; utilization is nobody's",
    ),
}
