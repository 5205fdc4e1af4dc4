"""Check whether an engine makes progress: it finishes steps, or its processes use CPU time.

The engine core is a separate process, which may be stopped or stuck while its actor answers. A long step counts as
progress; an engine without work never counts as stalled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from rlfuse.clock import now

MIN_CPU_SHARE = 0.02
"""Fraction of a CPU core; a process that uses less is only waiting."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Progress of an engine at the time of the request."""

    stalled_s: float
    """Seconds that the engine has had work without finishing a step or using CPU time."""
    last: str
    """The last activity, for messages."""


class Liveness:
    """Progress tracker of one engine. `cpu`: returns the CPU seconds of the engine's processes."""

    def __init__(self, cpu: Callable[[], float], clock: Callable[[], float] = now):
        self._cpu, self._clock = cpu, clock
        self._steps, self._last = 0, "none: no request yet"
        self._last_check = (0, cpu(), clock())
        self._progress_at = clock()

    def record_progress(self, what: str) -> None:
        """Record that the engine finished a step or a call, described by `what`."""
        self._steps += 1
        self._last = f"{what} at {time.strftime('%H:%M:%S', time.localtime(self._clock()))}"

    def check_progress(self, busy: bool) -> Pulse:
        """Return the progress since the last call. `busy`: the engine has work."""
        now, cpu = self._clock(), self._cpu()
        steps, computed, since = self._last_check
        if not busy or self._steps != steps or cpu - computed > MIN_CPU_SHARE * (now - since):
            self._progress_at = now
        self._last_check = (self._steps, cpu, now)
        return Pulse(now - self._progress_at, self._last)


def children_cpu() -> float:
    """Return the CPU seconds of this process's descendants."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total
