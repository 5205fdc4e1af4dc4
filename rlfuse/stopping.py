"""Stop a run on Ctrl-C, SIGTERM and SIGHUP.

    first signal, a step is running    --> finish the step --> checkpoint --> Stopped
    first signal, before the first step --> cancel work --> Stopped
    SIGTERM, SIGHUP, grace period exceeded --> cancel work --> Stopped; resume from the last checkpoint
    Ctrl-C twice --> cancel work --> Stopped; resume from the last checkpoint; three times: KeyboardInterrupt

Signals that were ignored when the process started (background jobs, nohup) stay ignored.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from signal import SIGHUP, SIGINT, SIGTERM
from types import FrameType
from typing import Any

from rlfuse.errors import first_error

NAMES = {SIGINT: "Ctrl-C", SIGTERM: "SIGTERM", SIGHUP: "SIGHUP (the terminal was closed)"}
ONCE_S = 0.3
"""Signals within this time count as one: wrappers (srun, docker) forward a Ctrl-C that the terminal sent to all."""

_last: signal.Signals | None = None


def stop_signal() -> signal.Signals | None:
    """Return the signal that requested this process to stop; None if there was none."""
    return _last


class Stopped(Exception):
    """The run ended because of signal `by`; the message states whether the current step was saved."""

    def __init__(self, text: str, by: signal.Signals):
        super().__init__(text)
        self.by = by


class Stopping:
    """Stop requests of a job. `grace_s`: time limit of a step after SIGTERM or SIGHUP; `say`: prints a line."""

    def __init__(self, grace_s: float, say: Callable[[str], None]):
        self.grace_s, self._say = grace_s, say
        self.step: int | None = None
        """The step in progress, which may finish before the run stops; None before the first."""
        self.by: signal.Signals | None = None
        self.relocation: Exception | None = None
        """Set if the job continues on other nodes without a stop signal: the error to raise after the step."""
        self._at = 0.0  # time of the first Ctrl-C
        self._ending = self._raised = self._hung_up = False
        self._limit: asyncio.TimerHandle | None = None
        self._limited_by = SIGTERM

    @property
    def is_requested(self) -> bool:
        return self.by is not None or self.relocation is not None

    def stop_error(self, step: int) -> Exception:
        """Return the error to raise once `step` is saved, after a stop request or for a relocation."""
        if self.by is None and self.relocation is not None:
            return self.relocation
        by = self.by or SIGTERM
        return Stopped(f"{NAMES[by]}: stopped after step {step}, which is saved.", by)

    async def listen_during(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; raise Stopped if a signal ended it. Signals are handled in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return await work
        self._task, self._loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in NAMES}
        for number in NAMES:
            if number == SIGTERM or before[number] != signal.SIG_IGN:
                signal.signal(number, self._handle)
        try:
            with _woken_by_signals(self._loop):
                await self._task
        except BaseException as error:
            # While Ray starts, it handles SIGTERM and exits with the signal's number.
            started = isinstance(error, SystemExit) and error.code == SIGTERM
            stopped = self.by is not None or started
            if not stopped or self._raised or isinstance(error, Stopped | KeyboardInterrupt):
                raise
            raise Stopped(self._why(first_error(error)), self.by or SIGTERM) from first_error(error)
        finally:
            for number, handler in before.items():
                again = number == SIGHUP and self._hung_up  # the kernel and the shell send one each
                signal.signal(number, signal.SIG_IGN if again else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        global _last
        now, again = time.monotonic(), number == SIGINT and self._at > 0
        if again and now - self._at < ONCE_S:
            return
        self._hung_up = self._hung_up or number == SIGHUP
        _drop_lost_output(terminal=number == SIGHUP)
        if number == SIGINT and self._ending:
            self._raised = True
            raise KeyboardInterrupt
        if number == SIGINT:
            self._at = self._at or now
        _last = self.by = self.by or signal.Signals(number)
        self._ending = self._ending or again or self.step is None
        if self._ending:
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            self._loop.call_soon_threadsafe(self._announce, signal.Signals(number))

    def _announce(self, number: signal.Signals) -> None:
        follows = f"{NAMES[number]}: stopping with a checkpoint after step {self.step}"
        if number == SIGINT:
            self._say(f"{follows}; press Ctrl-C again to stop immediately")
        elif self._limit is None:
            self._limited_by = number
            self._say(f"{follows}, if it ends within trainer.preemption_grace_s={self.grace_s:g} s")
            self._limit = self._loop.call_later(self.grace_s, self._task.cancel)

    def _why(self, error: BaseException) -> str:
        name = NAMES[self.by or SIGTERM]
        if self.step is None:
            return f"{name} before the first step: nothing to save."
        if not isinstance(error, asyncio.CancelledError | SystemExit):
            return f"{name}; the run failed before step {self.step} was saved: {error}"
        if self._ending:
            return f"{NAMES[SIGINT]} again: step {self.step} was cancelled and its work is lost."
        return (
            f"{NAMES[self._limited_by]}: step {self.step} was not finished and saved within "
            f"trainer.preemption_grace_s={self.grace_s:g} s; its work is lost."
        )


@contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake the main thread, so that handlers run promptly if another thread receives the signal."""
    reads, writes = socket.socketpair()
    with reads, writes:
        reads.setblocking(False)
        writes.setblocking(False)
        loop.add_reader(reads, lambda: reads.recv(4096))
        before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reads)


def _drop_lost_output(terminal: bool) -> None:
    """Discard output to pipes without a reader and to a closed terminal, where writing would raise."""
    poll, null = select.poll(), os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    lost = {descriptor for descriptor, _ in poll.poll(0)}  # reports errors and hang-ups only
    for descriptor in (1, 2):
        if descriptor in lost or (terminal and os.isatty(descriptor)):
            os.dup2(null, descriptor)
    os.close(null)
