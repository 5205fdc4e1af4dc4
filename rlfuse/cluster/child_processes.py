"""Signals and exit statuses of child processes under Ray, which changes both."""

import ctypes
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext

import psutil

POOL_WORKER = "pebble_pool_worker"
POLL_S = 0.002
LOOK_S = 1.0


class PoolLock:
    """Reentrant lock between a process and the workers of its pool, released when its holder dies.

    It has no name in shared memory that could be left behind.
    """

    def __init__(self, path: str = "") -> None:
        self._file = os.open(path, os.O_RDWR) if path else os.memfd_create("lock")
        self._threads, self._depth = threading.RLock(), 0

    def __reduce__(self) -> tuple:
        return PoolLock, (f"/proc/{os.getpid()}/fd/{self._file}",)

    def __del__(self) -> None:
        os.close(self._file)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        until = time.monotonic() + (inf if timeout is None else timeout) if block else 0.0
        if not self._threads.acquire(block, timeout if block and timeout is not None else -1):
            return False
        while self._depth == 0 and not self._acquire_file():
            if time.monotonic() > until:
                self._threads.release()
                return False
            time.sleep(POLL_S)
        self._depth += 1
        return True

    def _acquire_file(self) -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()


class PoolContext(SpawnContext):
    """Start method of pools: spawned workers, with locks that do not outlive a crash."""

    def RLock(self) -> PoolLock:
        return PoolLock()


def restore_child_signals() -> None:
    """Restore SIGCHLD on any thread: Ray ignores it, so that exit statuses read as 0."""
    ctypes.CDLL(None).signal(int(signal.SIGCHLD), None)  # SIG_DFL is a null pointer


@contextmanager
def preserve_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces at its start."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def keep_hangup_from_children() -> None:
    """Block SIGHUP in this thread and its children; another thread of this process receives it."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return
    if signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}):
        return

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        threading.Event().wait()

    threading.Thread(target=receive, daemon=True, name="SIGHUP").start()


def kill_stopped_workers(ended: threading.Event) -> None:
    """Kill pool workers of this process that were stopped by SIGSTOP, until `ended`; pools replace dead workers."""

    def watch() -> None:
        before: set[int] = set()
        while not ended.wait(LOOK_S):
            workers = [each.pid for each in multiprocessing.active_children() if each.name == POOL_WORKER]
            stopped = {pid for pid in workers if _is_stopped(pid)}
            for pid in stopped & before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            before = stopped

    threading.Thread(target=watch, daemon=True, name="stopped workers").start()


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def end_with_parent() -> None:
    """End this multiprocessing child when its parent ends, even during a blocking call."""
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        wait([parent])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def bind(core: int | None) -> None:
    """Bind all threads of this process and its children to one core; None: do nothing.

    Raises ValueError for a core that the host does not have.
    """
    if core is None:
        return
    cores = os.cpu_count() or 1
    if not 0 <= core < cores:
        raise ValueError(f"core={core}: this host has cores 0 to {cores - 1}")
    actor = psutil.Process()
    for process in (actor, *actor.children(recursive=True)):
        for thread in process.threads():
            with suppress(ProcessLookupError):  # it may have ended since
                os.sched_setaffinity(thread.id, {core})
