"""Waiting for transfers and timing: on the host with gloo, on CUDA streams with NCCL.

A sent tensor lives until the send completes (gloo: a thread waits; NCCL: torch's allocator tracks it). With NCCL the
host only waits for the operation RUN_AHEAD back. Every wait ends after `timeout` seconds with an `EngineError` that
names operation and peer; the group's timeout is longer. (Streams: not tested on GPUs.)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from rlfuse import clock
from rlfuse.errors import EngineError

RUN_AHEAD = 2
"""Operations launched ahead of the device; two hide the launch time."""
POLL_S = 0.0005
ErrorFactory = Callable[[str, int, Exception], EngineError]
"""Function from (purpose, rank, error) to the error to raise."""


class HostWaits:
    """Waits of gloo. A thread waits for the sends in order."""

    def __init__(self, timeout: float, make_error: ErrorFactory):
        self.timeout, self.make_error = timeout, make_error
        self.error: EngineError | None = None
        self._sends: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name="pipeline sends", daemon=True)
        self._thread.start()

    def wait_received(self, work: Any, purpose: str, rank: int) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self.make_error(purpose, rank, error) from error

    def track_send(self, work: Any, tensor: Tensor, purpose: str, rank: int) -> None:
        self._sends.put((work, tensor, purpose, rank))

    def mark_end(self, moment: float, purpose: str, rank: int) -> None:
        pass  # it has mark_end already

    def finish(self) -> None:
        self._sends.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _drain(self) -> None:
        while (send := self._sends.get()) is not None:
            work, _, purpose, rank = send
            try:
                self.wait_received(work, purpose, rank)
            except EngineError as error:
                self.error = error
                return

    def now(self) -> float:
        return clock.now()

    def seconds(self, moment: float) -> float:
        return moment


class StreamWaits:
    """Waits of NCCL: they order streams; moments are events on the computing stream."""

    def __init__(self, timeout: float, make_error: ErrorFactory):
        self.timeout, self.make_error = timeout, make_error
        self._running: deque[tuple[Callable[[], bool], str, int]] = deque()
        self._sending: list[tuple[Callable[[], bool], str, int]] = []
        self._first = self.now()
        self._first.synchronize()
        self._began = clock.now()

    def wait_received(self, work: Any, purpose: str, rank: int) -> None:
        work.wait()  # with a timeout it would block the host

    def track_send(self, work: Any, tensor: Tensor, purpose: str, rank: int) -> None:
        self._sending = [each for each in self._sending if not each[0]()]  # a work object keeps its tensor alive
        self._sending.append((work.is_completed, purpose, rank))

    def mark_end(self, moment: torch.cuda.Event, purpose: str, rank: int) -> None:
        self._running.append((moment.query, purpose, rank))
        if len(self._running) > RUN_AHEAD:
            self._wait(*self._running.popleft())

    def finish(self) -> None:
        for each in (*self._running, *self._sending):
            self._wait(*each)

    def _wait(self, done: Callable[[], bool], purpose: str, rank: int) -> None:
        limit = time.monotonic() + self.timeout
        while not done():
            if time.monotonic() > limit:
                raise self.make_error(
                    purpose, rank, TimeoutError(f"the operation is not complete after {self.timeout:g} s")
                )
            time.sleep(POLL_S)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: torch.cuda.Event) -> float:
        return self._began + self._first.elapsed_time(moment) / 1000


WAITS = {"gloo": HostWaits, "nccl": StreamWaits}
"""torch.distributed backend -> class."""
