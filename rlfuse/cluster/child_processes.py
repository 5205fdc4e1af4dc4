"""Signals and child processes beside Ray, which takes some of either: exit statuses, SIGTERM, an end with the parent.

Role: `restore_child_signals` is called by the driver once Ray is up, and by processes that run users' code;
`preserve_sigterm` by the driver around Ray's start, `keep_hangup_from_children` before it starts anything;
`end_with_parent` by the workers of process pools and by engines; `kill_stopped_workers` by those who have such pools.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

import psutil

POOL_WORKER = "pebble_pool_worker"
LOOK_S = 1.0
"""Seconds between two checks of the workers of a pool; one that is stopped in both is killed and replaced."""


def restore_child_signals() -> None:
    """Exit statuses of this process's children again: Ray, told to end them, ignores SIGCHLD, so that all read as 0.

    On any thread: Python lets only the main one set signals, and an asyncio actor is made on another.
    """
    ctypes.CDLL(None).signal(int(signal.SIGCHLD), None)  # SIG_DFL is a null pointer


@contextmanager
def preserve_sigterm() -> Iterator[None]:
    """What SIGTERM does stays what it did: Ray, when it starts, makes it exit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def keep_hangup_from_children() -> None:
    """Block SIGHUP in this thread, and so in all processes it starts: a closed terminal sends it to each of them.

    This process still receives it, by a thread that does not block it. No-op where SIGHUP is ignored, as under nohup.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return
    if signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}):
        return

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        threading.Event().wait()

    threading.Thread(target=receive, daemon=True, name="SIGHUP").start()


def kill_stopped_workers(ended: threading.Event) -> None:
    """Until `ended`: kill workers of this process's pools that SIGSTOP has stopped; their pools replace dead ones."""

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
    """In a process that multiprocessing started: end when the parent does, also in the middle of what never answers."""
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        wait([parent])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()
