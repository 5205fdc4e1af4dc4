"""Decide whether an engine makes progress: it finishes steps, or its processes compute.

An engine core is a process of its own, which may be stopped or stuck while its actor answers. A long step is progress;
an engine without work cannot stand still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from rlfuse.clock import now

MIN_CPU_SHARE = 0.02
"""Share of a core that a process which only waits stays below."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """State of an engine when requested."""

    stalled_s: float
    """Seconds with work, but without a step or computation."""
    last: str
    """What it did last, for messages."""


class Liveness:
    """`cpu`: seconds that the engine's processes have computed."""

    def __init__(self, cpu: Callable[[], float], clock: Callable[[], float] = now):
        self._cpu, self._clock = cpu, clock
        self._steps, self._last = 0, "it has not been asked for anything"
        self._seen = (0, cpu(), clock())
        self._moved = clock()

    def did(self, what: str) -> None:
        """Note that the engine finished a step or a call."""
        self._steps += 1
        self._last = f"{what} at {time.strftime('%H:%M:%S', time.localtime(self._clock()))}"

    def judge(self, busy: bool) -> Pulse:
        """`busy`: the engine has work."""
        now, cpu = self._clock(), self._cpu()
        steps, computed, since = self._seen
        if not busy or self._steps != steps or cpu - computed > MIN_CPU_SHARE * (now - since):
            self._moved = now
        self._seen = (self._steps, cpu, now)
        return Pulse(now - self._moved, self._last)


def children_cpu() -> float:
    """Return the seconds that this process's descendants have computed."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total
