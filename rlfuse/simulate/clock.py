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
    """Every task waits for another one, and no timer will wake any of them."""


class _VirtualSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"deadlock at {self.now:.6f} virtual seconds: every task waits for another, no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time. Threads and sockets never wake it."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def _run_once(self) -> None:
        """asyncio calls timers due within its clock's resolution; late floats have a coarser one."""
        self._clock_resolution = max(RESOLUTION_S, math.ulp(self._clock.now))
        super()._run_once()  # type: ignore[misc]  # of asyncio, which typeshed leaves out


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result without waiting. Raises `Deadlock` where a real loop would hang. A running event
    loop (of a notebook or a real controller) is blocked meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(coroutine)
    with ThreadPoolExecutor(1) as thread:  # a thread can have but one running loop
        return thread.submit(_run, coroutine).result()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
