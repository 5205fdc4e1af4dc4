"""Draw pictures of a run in a separate process that never delays or ends the run.

    submit --pipe--> function(arguments) writes a file --pipe--> report_finished: then()

A picture may take `DRAWING_S`, and at most `MAX_QUEUED` are queued. The process has low priority, ignores signals to
its group, and ends with the run. It is started by subprocess, as multiprocessing would execute the user's script again.
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
    """Error of a picture that could not be drawn."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Picture that is queued or being drawn."""

    what: str
    then: Callable[[], None]
    future: Future


class Drawing:
    """Drawing process of one run. `say` prints what could not be drawn. For use from one thread."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._requests: deque[_Request] = deque()
        self._thread = ThreadPoolExecutor(1, "drawing")
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._closed = False

    def submit(self, what: str, then: Callable[[], None], target: str, *arguments: Any) -> None:
        """Queue a call of `target` ("module:function"); `report_finished` calls `then` later. `what`: for messages."""
        if len(self._requests) < MAX_QUEUED:
            future = self._thread.submit(self._draw, target, arguments)
        else:
            future = Future()
            future.set_exception(NotDrawn(f"{MAX_QUEUED} others are queued; draw less often"))
        self._requests.append(_Request(what, then, future))

    def report_finished(self) -> None:
        while self._requests and self._requests[0].future.done():
            request = self._requests.popleft()
            error = ENDED if request.future.cancelled() else request.future.exception()
            if error is not None:
                self._say(f"{request.what} was not drawn: {error}")
            request.then()

    def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` for queued pictures, report them and those not drawn, and end the process."""
        try:
            wait([request.future for request in self._requests], wait_s)
        finally:  # also after KeyboardInterrupt: the interpreter would wait for the thread
            self._closed = True
            self._thread.shutdown(wait=False, cancel_futures=True)
            if self._process is not None:
                self._process.kill()
                self._process.wait()
        wait([request.future for request in self._requests if not request.future.cancelled()], ENDED_S)
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
                process_group=0,  # not a new session: autogroup scheduling would ignore the nice value
            )


def main(descriptor: int) -> None:
    """Run the process: draw what the pipe requests, until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all children of the run
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
        gc.collect()  # charts of Matplotlib are reference cycles
        ctypes.CDLL(None).malloc_trim(0)  # glibc would keep 0.1 MiB more for each picture


if __name__ == "__main__":
    main(int(sys.argv[1]))
