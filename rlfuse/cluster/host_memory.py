"""Memory of this host and its control groups, and the kernel's count of OOM kills since import. Linux only."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
NO_LIMIT = 1 << 60
"""Bytes; cgroup v1 reports a larger number if there is no limit."""
LEAST_SHARED_MIB = 64
NO_MEMORY = re.compile(r"can(?:'|no)t allocate memory|out of memory|bad_alloc|MemoryError", re.I)
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mib() -> int:
    """Return the resident memory of this process in MiB; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE >> 20
    except OSError:
        return 0


def free_bytes() -> int:
    """Return the free bytes of this host or of this process's control group, whichever is less; 0 if unknown."""
    found = [max(0, limit - used) for limit, used in _limits()]
    with suppress(OSError):
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    return min(found, default=0)


def free_memory() -> str:
    """Describe the free memory, with a leading space; may be empty."""
    parts = []
    with suppress(OSError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        host = {words[0]: int(words[1]) << 10 for words in lines}
        parts.append(f"{_gib(host['MemAvailable:'])} of the host's {_gib(host['MemTotal:'])}")
    for limit, used in _limits():
        parts.append(f"{_gib(max(0, limit - used))} of its control group's {_gib(limit)}")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        parts.append(f"{_gib(shared.free)} of the {_gib(shared.total)} in /dev/shm")
    return f" Free memory now: {', '.join(parts)}." if parts else ""


def oom_kills() -> str:
    """Describe OOM kills since the start, with a leading space; else empty."""
    own, host = (now - before for now, before in zip(_kills(), AT_START, strict=True))
    if own > 0:
        return f" The kernel's out-of-memory killer has ended {own} processes since the run began: it is out of memory."
    if host > 0:
        many = "a process" if host == 1 else f"{host} processes"
        return (
            f" The kernel killed {many} of this host for lack of memory since the run began, possibly of another job."
        )
    return ""


def shared_full() -> str:
    """Return a warning, with a leading space, if shared memory is nearly full; else an empty string."""
    free = shutil.disk_usage("/dev/shm").free >> 20
    if free >= LEAST_SHARED_MIB:
        return ""
    return f" /dev/shm has only {free} MiB left: remove files from it or enlarge it (docker: --shm-size)."


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _groups(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Return the folders of this process's memory control groups, innermost first."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            mount = root / controllers
            inner = mount / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_dir():  # in a container the path may be that of the host
                    yield folder
                if folder == mount:
                    break


def _limits() -> list[tuple[int, int]]:
    found = []
    for folder in _groups():
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):  # no such file, or "max"
                found.append((int((folder / limit).read_text()), int((folder / used).read_text())))
    return sorted((each for each in found if each[0] < NO_LIMIT), key=lambda each: each[0] - each[1])[:1]


def _kills() -> tuple[int, int]:
    """Count OOM kills of the innermost control group that counts, and of the host; 0 if unreadable."""
    own = (folder / name for folder in _groups() for name in ("memory.events", "memory.oom_control"))
    return next((found for path in own if (found := _count(path)) is not None), 0), _count(VMSTAT) or 0


def _count(path: Path) -> int | None:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


AT_START = _kills()
