"""Draw pictures of a run in a separate process that never delays or ends the run.

    ask --pipe--> function(arguments) writes a file --pipe--> tell: then()

A picture may take DRAWING_S and at most MOST are queued. The process has low priority, ignores signals of the group,
and ends with the run's. It is started by subprocess: multiprocessing would execute the user's script again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from threading import Thread, Timer
from typing import Any

DRAWING_S = 120.0
ENDED_S = 10.0
MAX_QUEUED = 8
ENDED = "the run ended first"


class NotDrawn(Exception):
    """A picture that could not be drawn; the message says why."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A picture under way."""

    what: str
    then: Callable[[], None]
    future: Future


class Drawing:
    """Draws for one run; `say` tells the person what could not be drawn. Used from one thread."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._requests: deque[_Asked] = deque()
        self._thread = ThreadPoolExecutor(1, "drawing")
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._closed = False

    def submit(self, what: str, then: Callable[[], None], target: str, *arguments: Any) -> None:
        """Have `target` ("module:function") draw; `report_finished` calls `then` once it was tried. `what`: for messages."""
        if len(self._requests) < MAX_QUEUED:
            future = self._thread.submit(self._draw, target, arguments)
        else:
            future = Future()
            future.set_exception(NotDrawn(f"{MAX_QUEUED} others are queued; draw less often"))
        self._requests.append(_Asked(what, then, future))

    def report_finished(self) -> None:
        while self._requests and self._requests[0].future.done():
            asked = self._requests.popleft()
            error = ENDED if asked.future.cancelled() else asked.future.exception()
            if error is not None:
                self._say(f"{asked.what} was not drawn: {error}")
            asked.then()

    def close(self, wait_s: float) -> None:
        """Tell of all that is drawn within `wait_s` and of what is not, and end the process."""
        try:
            wait([asked.future for asked in self._requests], wait_s)
        finally:  # also where a person interrupts: the interpreter would wait for the thread
            self._closed = True
            self._thread.shutdown(wait=False, cancel_futures=True)
            if self._process is not None:
                self._process.kill()
                self._process.wait()
        wait([asked.future for asked in self._requests if not asked.future.cancelled()], ENDED_S)
        self.report_finished()

    def _draw(self, target: str, arguments: tuple) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process, late, began = self._process, Timer(DRAWING_S, self._process.kill), time.monotonic()
        late.start()
        try:
            self._connection.send((target, arguments))
            problem = self._connection.recv()
        except (EOFError, OSError):
            status = process.wait()
            late_by = time.monotonic() - began - DRAWING_S
            problem = f"its process ended with status {status}" if late_by < 0 else f"it took {DRAWING_S:g} s"
            problem = ENDED if self._closed else problem
        finally:
            late.cancel()
        if problem is not None:
            raise NotDrawn(problem)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # a session of its own would share cores out as if it were not nice
            )


def main(descriptor: int) -> None:
    """The process: draw what the other end of the pipe asks for, until that is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all children of the run's process
    os.nice(19)
    connection, requests = Connection(descriptor), SimpleQueue()

    def listen() -> None:
        try:
            while True:
                requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    Thread(target=listen, daemon=True).start()
    while True:
        target, arguments = requests.get()
        module, _, function = target.partition(":")
        try:
            getattr(import_module(module), function)(*arguments)
            connection.send(None)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
        gc.collect()  # Matplotlib's figures are cycles
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what they leave behind: 0.1 MiB more for each picture


if __name__ == "__main__":
    main(int(sys.argv[1]))
