"""A monotonic clock in epoch seconds for spans and durations, common to all processes on a machine.

Role: `now` is for times that are subtracted or ordered later; `time.time` is for dates shown to users and for ages of
files. Invariant: setting the system clock does not affect `now`. Processes that inherit the driver's environment on the
same machine share its offset, so that their spans are comparable.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
"""Id of the running kernel: shared by all containers of a machine, different after a reboot."""
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
    """Return the seconds since the epoch, by the system clock at the start of the run plus monotonic time."""
    return _OFFSET + time.monotonic()


def from_wall_clock(seconds: float) -> float:
    """Convert a recent `time.time()` to the time scale of `now`."""
    return now() - max(0.0, time.time() - seconds)


def process_start_ticks(pid: int) -> int:
    """Return the start time of a process in ticks since boot; together with the pid it identifies the process.

    FileNotFoundError or ProcessLookupError if there is none.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
