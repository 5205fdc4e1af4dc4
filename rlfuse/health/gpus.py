"""Read GPU use, clock and power from NVML, where `nvidia-ml-py` and NVIDIA's driver are installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Gpus:
    """`nvml`: the module pynvml, initialised."""

    def __init__(self, nvml: Any):
        self._nvml = nvml
        self._handles: dict[str, Any] = {}

    def read(self, device: str) -> dict[str, float]:
        """Of one device, as CUDA_VISIBLE_DEVICES names it: its number, or `GPU-...`."""
        nvml, found = self._nvml, {}
        with suppress(nvml.NVMLError):
            handle = self._handle(device)
            asked: dict[str, Callable[[], float]] = {
                "gpu_use": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                "gpu_clock": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            }
            for name, ask in asked.items():
                with suppress(nvml.NVMLError):  # this kind of device doesn't know
                    found[name] = ask()
        return found

    def _handle(self, device: str) -> Any:
        if device not in self._handles:
            if device.isdecimal():
                self._handles[device] = self._nvml.nvmlDeviceGetHandleByIndex(int(device))
            else:
                self._handles[device] = self._nvml.nvmlDeviceGetHandleByUUID(device)
        return self._handles[device]


def open_gpus() -> Gpus | None:
    """None where there is no package, or no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Gpus(pynvml)
