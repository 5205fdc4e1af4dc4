"""How a device waits for transfers and reads the time: on the host over gloo, on CUDA's streams over NCCL.

Role: one object per run of a schedule, chosen by backend: `arrived` before an operation, `left` after its result was
sent, `ended`, `finish` at the end of the row; `now` marks a moment, `seconds` converts it after `finish`.
Invariants: a sent tensor lives until it has left (gloo: a thread waits for that; NCCL: torch's allocator knows). Over
NCCL the host waits only for computation RUN_AHEAD operations back. Every wait ends after `timeout` seconds with an
`EngineError` that names operation and peer; the group's own limit is the last. (Streams: not run on GPUs.)
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
"""Operations whose kernels are launched before the device has ended those before: enough to hide launching."""
POLL_S = 0.0005
Lost = Callable[[str, int, Exception], EngineError]
"""What to raise for (purpose, rank, error)."""


class HostWaits:
    """Gloo's. A thread of its own waits for sends, one after the other."""

    def __init__(self, timeout: float, lost: Lost):
        self.timeout, self.lost = timeout, lost
        self.error: EngineError | None = None
        self._sends: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name="pipeline sends", daemon=True)
        self._thread.start()

    def arrived(self, work: Any, purpose: str, rank: int) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self.lost(purpose, rank, error) from error

    def left(self, work: Any, tensor: Tensor, purpose: str, rank: int) -> None:
        self._sends.put((work, tensor, purpose, rank))

    def ended(self, moment: float, purpose: str, rank: int) -> None:
        pass  # it has

    def finish(self) -> None:
        self._sends.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _drain(self) -> None:
        while (send := self._sends.get()) is not None:
            work, _, purpose, rank = send
            try:
                self.arrived(work, purpose, rank)
            except EngineError as error:
                self.error = error
                return

    def now(self) -> float:
        return clock.now()

    def seconds(self, moment: float) -> float:
        return moment


class StreamWaits:
    """NCCL's: waits order streams, moments are events on the stream that computes."""

    def __init__(self, timeout: float, lost: Lost):
        self.timeout, self.lost = timeout, lost
        self._running: deque[tuple[Callable[[], bool], str, int]] = deque()
        self._leaving: list[tuple[Callable[[], bool], str, int]] = []
        self._first = self.now()
        self._first.synchronize()
        self._began = clock.now()

    def arrived(self, work: Any, purpose: str, rank: int) -> None:
        work.wait()  # with a time limit it would hold the host

    def left(self, work: Any, tensor: Tensor, purpose: str, rank: int) -> None:
        self._leaving = [each for each in self._leaving if not each[0]()]  # a work keeps its tensor
        self._leaving.append((work.is_completed, purpose, rank))

    def ended(self, moment: torch.cuda.Event, purpose: str, rank: int) -> None:
        self._running.append((moment.query, purpose, rank))
        if len(self._running) > RUN_AHEAD:
            self._wait(*self._running.popleft())

    def finish(self) -> None:
        for each in (*self._running, *self._leaving):
            self._wait(*each)

    def _wait(self, done: Callable[[], bool], purpose: str, rank: int) -> None:
        limit = time.monotonic() + self.timeout
        while not done():
            if time.monotonic() > limit:
                raise self.lost(purpose, rank, TimeoutError(f"the device is still at it after {self.timeout:g} s"))
            time.sleep(POLL_S)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: torch.cuda.Event) -> float:
        return self._began + self._first.elapsed_time(moment) / 1000


WAITS = {"gloo": HostWaits, "nccl": StreamWaits}
"""By backend."""
