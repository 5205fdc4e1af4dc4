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

LEAST = 0.02
"""Share of a core: whoever waits for something that never comes uses less, whoever computes more."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How an engine was when asked."""

    still_s: float
    """For so long it has had work and neither finished a step nor computed; up to a pulse's distance more."""
    last: str
    """The last that it did, for people."""


class Liveness:
    """`cpu`: seconds that the engine's processes have computed so far."""

    def __init__(self, cpu: Callable[[], float], clock: Callable[[], float] = now):
        self._cpu, self._clock = cpu, clock
        self._steps, self._last = 0, "it has not been asked for anything"
        self._seen = (0, cpu(), clock())
        self._moved = clock()

    def did(self, what: str) -> None:
        """The engine finished a step, or something else that it was asked for."""
        self._steps += 1
        self._last = f"{what} at {time.strftime('%H:%M:%S', time.localtime(self._clock()))}"

    def judge(self, busy: bool) -> Pulse:
        """`busy`: it has work at hand."""
        now, cpu = self._clock(), self._cpu()
        steps, computed, since = self._seen
        if not busy or self._steps != steps or cpu - computed > LEAST * (now - since):
            self._moved = now
        self._seen = (self._steps, cpu, now)
        return Pulse(now - self._moved, self._last)


def children_cpu() -> float:
    """Seconds that the processes below this one have computed."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total
