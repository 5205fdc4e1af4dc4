"""Distinguish the user's Ctrl-C from a KeyboardInterrupt that a reward function raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_came = threading.Event()


def is_interrupted() -> bool:
    """Whether the user has interrupted what is watched."""
    return _came.is_set()


@contextmanager
def watch_interrupts() -> Iterator[None]:
    """Notice SIGINT, and do what it did before. Nothing in other threads than the main one, which no signal reaches."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        _came.set()
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
        if is_interrupted():
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
        _came.clear()
