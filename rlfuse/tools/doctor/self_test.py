"""Run the steps of the GPU path in one process per GPU, at least two, within `LIMIT_S`.

    gloo      all-reduce on the host, which ranks use in addition to NCCL
    compute   allocation and a matrix product in bfloat16, compared with float32
    copy      copy from pinned memory to the device and back
    ipc       a tensor of process 0 read and written by process 1, as an engine receives weights
    nccl      all-reduce, one process per GPU

With device=cpu the same steps run, except NCCL and pinning.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rlfuse.tools.doctor import Finding

LIMIT_S, GRACE_S = 120.0, 5.0
UNEVEN = 0.7
"""A GPU below this share of the speed of the fastest one is reported."""
SIZE = {"cuda": (8192, 256 << 20), "cpu": (256, 4 << 20)}
STEPS = {
    "gloo": ("GB/s", "set GLOO_SOCKET_IFNAME to lo, or to the interface between the nodes"),
    "compute": ("TFLOP/s", "check for Xid errors (dmesg, nvidia-smi -q) and other processes on the GPU (nvidia-smi)"),
    "copy": ("GB/s", "raise ulimit -l and the memory of the container; check the link with nvidia-smi -q -d PCIE"),
    "ipc": ("GB/s", "this container or virtual machine forbids CUDA IPC: set rollout.weight_transfer=shm"),
    "nccl": (
        "GB/s",
        "NCCL_DEBUG=INFO rlfuse doctor --self-test shows the cause; try NCCL_P2P_DISABLE=1, --shm-size=8g",
    ),
}


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one step in one process: its speed or its error."""

    step: str
    rank: int
    value: float = 0.0
    error: str = ""


def check_steps(
    reports: Sequence[Report], expected: dict[str, int], limit_s: float = LIMIT_S, uneven: float = UNEVEN
) -> list[Finding]:
    """Return one finding per step. `expected`: step -> number of processes; `uneven`: 0 if they share cores."""
    found = []
    for step, ranks in expected.items():
        unit, remedy = STEPS[step]
        mine = [report for report in reports if report.step == step]
        if failed := [report for report in mine if report.error]:
            text = f"process {failed[0].rank}: {failed[0].error}"
            return [*found, Finding(f"self-test: {step}", "problem", text, remedy)]
        if missing := sorted(set(range(ranks)) - {report.rank for report in mine}):
            text = f"process {', '.join(map(str, missing))} died or did not finish within {limit_s:g} s"
            return [*found, Finding(f"self-test: {step}", "problem", text, remedy)]
        slowest, fastest = min(mine, key=lambda each: each.value), max(mine, key=lambda each: each.value)
        text = f"{slowest.value:.3g} {unit}" + (f" to {fastest.value:.3g}" if ranks > 1 else "")
        if step == "compute" and slowest.value < uneven * fastest.value:
            why = f"GPU {slowest.rank} is slow: check heat, throttling and load (nvidia-smi -q -d PERFORMANCE)"
            found.append(Finding(f"self-test: {step}", "warning", text, why))
        else:
            found.append(Finding(f"self-test: {step}", "ok", text))
    return found


def self_test(device: str, count: int, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run the steps on `count` devices of type `device` (`cuda` or `cpu`) and return the findings."""
    import torch.multiprocessing as processes

    context, world = processes.get_context("spawn"), max(count, 2)
    expected = {"gloo": world, "compute": count, "copy": count, "ipc": 2}
    expected |= {"nccl": count} if device == "cuda" else {}
    reports, tensors = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="rlfuse-self-test-") as folder:
        arguments = [
            (rank, world, count, device, f"{folder}/rendezvous", limit_s, reports, tensors) for rank in range(world)
        ]
        started = [context.Process(target=_work, args=each, daemon=True) for each in arguments]
        for process in started:
            process.start()
        try:
            results = _gather(reports, started, sum(expected.values()), limit_s)
            return check_steps(results, expected, limit_s, UNEVEN if device == "cuda" else 0.0)
        finally:
            until = time.monotonic() + GRACE_S
            for process in started:
                process.join(max(0.0, until - time.monotonic()))
                process.kill()
                process.join()


def _gather(reports: Any, started: Sequence[Any], expected: int, limit_s: float) -> list[Report]:
    """Collect reports until all have arrived, the time limit, or a failure that blocks the rest."""
    found, until = [], time.monotonic() + limit_s
    while len(found) < expected and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            found.append(reports.get(timeout=0.2))
        if any(process.exitcode for process in started) or any(report.error for report in found):
            until = min(until, time.monotonic() + GRACE_S)
            expected = len(found) if all(process.exitcode is not None for process in started) else expected
    return found


def _work(
    rank: int, world: int, count: int, device: str, rendezvous: str, limit_s: float, reports: Any, tensors: Any
) -> None:
    import torch
    import torch.distributed as dist

    place = torch.device(device, rank % count) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    rows, size = SIZE[device]
    step = "gloo"

    def report(name: str, measure: Callable[[], float]) -> None:
        nonlocal step
        step = name
        reports.put(Report(step, rank, measure()))

    try:
        limit = timedelta(seconds=limit_s)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=limit)
        report("gloo", lambda: _reduce(torch.device("cpu"), SIZE["cpu"][1], None))
        if rank < count:
            report("compute", lambda: _multiply(place, rows))
            report("copy", lambda: _copy(place, size))
        dist.barrier()
        if rank < 2:
            report("ipc", lambda: _share(rank, torch.device(device, 0) if device == "cuda" else place, size, tensors))
        if device == "cuda":
            group = dist.new_group(list(range(count)), backend="nccl", timeout=limit)
            if rank < count:
                report("nccl", lambda: _reduce(place, size, group))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        reports.put(Report(step, rank, error=f"{type(error).__name__}: {text}"))


def _multiply(place: Any, rows: int) -> float:
    import torch

    torch.manual_seed(0)
    left, right = (torch.randn(rows, rows, device=place, dtype=torch.bfloat16) for _ in range(2))
    product = left @ right
    exact = left[:64].float() @ right.float()
    off = ((product[:64].float() - exact).norm() / exact.norm()).item()
    if not off < 0.02:
        raise ValueError(f"a matrix product in bfloat16 differs from float32 by {off:.1%}")
    return 2 * rows**3 * rate(lambda: torch.matmul(left, right, out=product), place) / 1e12


def _copy(place: Any, size: int) -> float:
    import torch

    here = torch.randint(256, (size,), dtype=torch.uint8)
    here = here.pin_memory() if place.type == "cuda" else here
    back = torch.zeros_like(here, pin_memory=place.type == "cuda")
    there = torch.empty_like(here, device=place)
    to = rate(lambda: there.copy_(here, non_blocking=True), place)
    fro = rate(lambda: back.copy_(there, non_blocking=True), place)
    if not torch.equal(here, back):
        raise ValueError("the data changed on the way to the device and back")
    return size * min(to, fro) / 1e9


def _share(rank: int, place: Any, size: int, tensors: Any) -> float:
    import torch
    import torch.distributed as dist

    if rank == 0:
        mine = torch.full((size,), 7, dtype=torch.uint8, device=place)
        tensors.put(mine)
        dist.recv(torch.zeros(1), src=1)  # keeps the memory until the other process has finished
        if mine[0].item() != 9:
            raise ValueError("a write of the other process is not visible")
        return size * rate(mine.clone, place) / 1e9
    theirs = tensors.get(timeout=LIMIT_S)
    if not bool((theirs == 7).all()):
        raise ValueError("the memory of the other process has wrong contents")
    speed = size * rate(theirs.clone, place) / 1e9
    theirs[0] = 9
    _wait(place)
    del theirs
    dist.send(torch.zeros(1), dst=0)
    return speed


def _reduce(place: Any, size: int, group: Any) -> float:
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(group)
    tensor = torch.ones(size // 4, device=place)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == world).all()):
        raise ValueError(f"all-reduce of ones over {world} processes returned {tensor[0].item():g}")
    return size * rate(lambda: dist.all_reduce(tensor, group=group), place) / 1e9


def rate(action: Callable[[], Any], place: Any) -> float:
    """Return the calls per second of `action`, the best of five measurements."""
    best = 0.0
    for _ in range(5):
        _wait(place)
        began = time.perf_counter()
        action()
        _wait(place)
        best = max(best, 1 / (time.perf_counter() - began))
    return best


def _wait(place: Any) -> None:
    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)
