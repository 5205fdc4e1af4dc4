"""DeepSpeed's compiled operations, which a process that was killed while it loaded them would lock for ever.

Role: called by a rank before it meets the others. torch guards each extension's folder by a file `lock`, which exists
as long as a process compiles or loads; one that is killed there leaves it behind, and whoever comes later would wait
without end or word.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

from rlfuse.engines.protocols import EngineError

STALE_S = 60.0
"""A lock this old that no process of this host has open is left over; on a shared folder another host may compile."""


def wait_for_extensions(limit_s: float, stale_s: float = STALE_S) -> None:
    """Until no extension is locked, left-over locks removed; EngineError after `limit_s`."""
    root, deadline = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()), time.time() + limit_s
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        while lock.exists():
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > stale_s and not _held(lock):
                    lock.unlink()
            if time.time() > deadline:
                raise EngineError(
                    f"{lock} has kept this rank waiting for {limit_s:g} s: another process compiles DeepSpeed's "
                    "operations. End it, or remove that file if there is none."
                )
            time.sleep(0.1)


def _held(lock: Path) -> bool:
    """Whether a process of this host has it open, as the one that made it does."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
                if os.path.realpath(descriptor.path) == str(lock.resolve()):
                    return True
    return False
