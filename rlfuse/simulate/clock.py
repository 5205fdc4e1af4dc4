"""A virtual clock for asyncio: time jumps to the next timer when nothing is ready."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
RESOLUTION_S = 1e-9


class Deadlock(RuntimeError):
    """Every task waits for another task, and no timer is set."""


class _VirtualSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"deadlock at {self.now:.6f} virtual seconds: every task waits for another, no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on virtual time; it ignores threads and sockets."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def _run_once(self) -> None:
        """Adapt the clock resolution: asyncio calls timers due within it, and large floats have a coarser one."""
        self._clock_resolution = max(RESOLUTION_S, math.ulp(self._clock.now))
        super()._run_once()  # type: ignore[misc]  # missing in typeshed


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on virtual time and return its result. Raises `Deadlock` where a real loop would hang. Blocks a
    running event loop (notebook, controller)."""
    if asyncio._get_running_loop() is None:
        return _run(coroutine)
    with ThreadPoolExecutor(1) as thread:  # a thread can only have one running loop
        return thread.submit(_run, coroutine).result()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
