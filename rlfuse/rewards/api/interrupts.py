"""Distinguish Ctrl-C by the user from a KeyboardInterrupt that a reward function raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_interrupted = threading.Event()


def is_interrupted() -> bool:
    """Return whether the user pressed Ctrl-C within the current `watch_interrupts`."""
    return _interrupted.is_set()


@contextmanager
def watch_interrupts() -> Iterator[None]:
    """Record SIGINT and call the previous handler. No effect outside the main thread, which alone receives signals."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def record(number: int, frame: FrameType | None) -> None:
        _interrupted.set()
        before(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield
        if is_interrupted():
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
        _interrupted.clear()
