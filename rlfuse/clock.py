"""Time that never goes back: epoch seconds for spans and durations, alike in all processes of a machine.

Role: `now` is for whatever is subtracted or ordered later. `time.time` is for dates that people read and for the ages
of files. Invariant: when the system's clock is set, `now` is unaffected. Processes that inherit the driver's
environment on the same machine share its offset, so their spans stay comparable even when they start afterwards.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
"""Identifies the running kernel: containers of a machine share it, another machine or another boot has a new one."""
OFFSET = "RLFUSE_CLOCK_OFFSET"


def _offset() -> float:
    boot, _, seconds = os.environ.get(OFFSET, "").partition(" ")
    if boot == BOOT:
        return float(seconds)
    offset = time.time() - time.monotonic()
    os.environ[OFFSET] = f"{BOOT} {offset!r}"
    return offset


_OFFSET = _offset()


def now() -> float:
    """Return the seconds since the epoch by the clock that was set when the run started."""
    return _OFFSET + time.monotonic()


def from_wall_clock(seconds: float) -> float:
    """Return what `now` was at a moment just past, given by `time.time`."""
    return now() - max(0.0, time.time() - seconds)


def process_start_ticks(pid: int) -> int:
    """Return when a process of this machine started, in ticks since the boot; with its id, it identifies the process.

    FileNotFoundError or ProcessLookupError where there is none.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
