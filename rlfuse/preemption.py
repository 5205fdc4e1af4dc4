"""Leaving when told to: SIGTERM, which clouds and schedulers send before they take a machine.

Role: `Job.carry_out` listens while the job's work runs; the journal asks `asked` wherever a step is over.

    SIGTERM --> steps run:    the step under way ends --> checkpoint --> Preempted      (exit status 75)
           |                  the grace is over first: work cancelled --> Preempted, the last checkpoint counts
           '-> still starting: nothing could be saved, work cancelled --> Preempted

Invariant: whatever ends the work after SIGTERM, workers that got the signal too and died included, the job ends as
`Preempted`: the same command goes on from its last whole checkpoint.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any


class Preempted(Exception):
    """The run was told to leave, and left; the message says what became of the step under way."""


class Preemption:
    """Whether this job was told to leave. `grace_s`: what a step may still take; `say`: tells the person."""

    def __init__(self, grace_s: float, say: Callable[[str], None]):
        self.grace_s, self.asked, self.stepping = grace_s, False, False
        """`stepping`: engines stand, and a step's end is worth waiting for."""
        self._say = say

    async def heed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`; Preempted if SIGTERM came, unless it ended well nevertheless. Only a main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            return await work
        self._task, self._loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        before = signal.signal(signal.SIGTERM, self._told)
        try:
            await self._task
        except BaseException as error:
            # While Ray starts, SIGTERM is its own: it exits with the signal's number.
            started = isinstance(error, SystemExit) and error.code == signal.SIGTERM
            if not (self.asked or started) or isinstance(error, Preempted | KeyboardInterrupt):
                raise
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise Preempted(self._why(error)) from error
        finally:
            signal.signal(signal.SIGTERM, before)

    def _told(self, signum: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if not self.stepping:
            self._task.cancel()
            return
        self._say(f"SIGTERM: a checkpoint follows the step under way (trainer.preemption_grace_s={self.grace_s:g})")
        self._loop.call_later(self.grace_s, self._task.cancel)

    def _why(self, error: BaseException) -> str:
        if not isinstance(error, asyncio.CancelledError | SystemExit):
            return f"SIGTERM, and before the step under way was saved: {error}"
        if not self.stepping:
            return "SIGTERM while the run started: there was nothing to save."
        return (
            f"SIGTERM: the step under way was not over and saved within trainer.preemption_grace_s={self.grace_s:g} s, "
            "so what it did is lost."
        )
