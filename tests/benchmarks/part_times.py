"""Time by part of a process, for `gpu_profile.py`."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])
"""Label -> wall seconds, CPU seconds of the thread, calls."""


@contextmanager
def noted(label: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        each = spent[label]
        each[0] += time.perf_counter() - wall
        each[1] += time.thread_time() - cpu
        each[2] += 1


def timed(owner: Any, name: str, label: str) -> None:
    """Time a method, if the owner has it."""
    if (found := getattr(owner, name, None)) is None:
        return

    @functools.wraps(found)
    def call(*arguments: Any, **named: Any) -> Any:
        with noted(label):
            return found(*arguments, **named)

    setattr(owner, name, call)


def collected(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        collected.at = time.perf_counter()  # type: ignore[attr-defined]
    else:
        spent["(garbage collection)"][0] += time.perf_counter() - collected.at  # type: ignore[attr-defined]
        spent["(garbage collection)"][2] += 1


def kernel_rows(trace: Any, steps: int = 1) -> list[tuple[str, float, float]]:
    """Return (name, milliseconds, calls) of each kernel per step."""
    return [(e.key[:90], e.self_device_time_total / 1e3 / steps, e.count / steps) for e in trace.key_averages()]
