"""Start vLLM's engine process as a fork of its actor, which has already imported vLLM: a third of a start.

vLLM spawns a process: on CPU hosts because of OpenMP's threads, of which an engine here has one; on GPUs because it
runs in a Ray actor, although a fork works until the actor has opened the device (`can_fork`). As a new process would, a
fork
- has none of the actor's sockets, files and locks, so that the actor's end is noticed;
- has no connection to Ray, default signal handlers and its own garbage collection, and ends with its actor. Only the
  forking thread exists in it: no lock may be held by another. OpenMP would wait for its threads forever, so actors have
  one (`rollout_env`).
"""

from __future__ import annotations

import gc
import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from typing import Any
from unittest import mock

import ray

from rlfuse.cluster.child_processes import end_with_parent

DRIVER = re.compile("/dev/(nvidia|dxg)")
"""Device files of NVIDIA's driver, on Linux and under Windows."""
PARALLEL = ("tensor", "pipeline", "data")


class EngineFork(ForkProcess):
    """The engine's process."""

    def run(self) -> None:
        """Detach from the actor, then run."""
        _leave_garbage()
        _answer_signals()
        _leave_files()
        ray._private.worker.global_worker.set_is_connected(False)
        ray._raylet.setproctitle(f"VLLM::{self.name}")  # vLLM can't: Ray has moved the actor's title
        end_with_parent()
        super().run()


class Forks(ForkContext):
    """The multiprocessing context of these processes."""

    Process = EngineFork


def can_fork(device: str, arguments: Mapping[str, Any], threads: str | None, files: Iterable[str]) -> bool:
    """Return whether an engine with these arguments can be a fork of this process. `threads`: of OpenMP; `files`: open
    here. CUDA and NVML do not survive a fork once initialised, which opens a device file. Ray workers need an engine
    connected to Ray."""
    if device == "cpu":
        return True
    executor = arguments.get("distributed_executor_backend")
    if executor is None and all(arguments.get(f"{kind}_parallel_size", 1) == 1 for kind in PARALLEL):
        executor = "uni"
    must_spawn = arguments.get("numa_bind") or any(map(DRIVER.match, files))  # vLLM binds only new processes
    return executor in ("uni", "mp") and threads == "1" and not must_spawn


@contextmanager
def forking(device: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Fork engines that start within, and their tensor-parallel workers, if they `can_fork`. On `cpu`, vLLM inspects
    model classes in this process instead of a new one, so that a fork finds them imported."""
    from vllm.model_executor.models import registry
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    by_user = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")

    def context() -> BaseContext:
        if by_user and device != "cpu":
            return get_mp_context()
        threads, files = os.environ.get("OMP_NUM_THREADS"), os.listdir("/proc/self/fd")
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in files]
        return Forks() if can_fork(device, arguments, threads, opened) else get_mp_context()

    inspect = (lambda look: look()) if device == "cpu" else registry._run_in_subprocess
    with (
        mock.patch.object(utils, "get_mp_context", context),
        mock.patch.object(multiproc_executor, "get_mp_context", context),
        mock.patch.object(registry, "_run_in_subprocess", inspect),
    ):
        yield


def _leave_garbage() -> None:
    """Exclude the actor's objects from collections and drop its callbacks. At the end of an engine vLLM would unfreeze
    them and collect twice, a quarter of a small engine's CPU time."""
    gc.freeze()
    gc.unfreeze = lambda: None
    if gc_utils := sys.modules.get("vllm.utils.gc_utils"):
        gc_utils.freeze_gc_for_cudagraph_capture = _without_collection
    gc.callbacks.clear()
    gc.enable()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Replace vLLM's context of CUDA graph capture, which freezes objects: nothing would unfreeze them here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _answer_signals() -> None:
    """Restore default signal handlers."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _leave_files() -> None:
    """Close all files but standard streams and pipes. /dev/null takes their numbers, since an object may still close
    one."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the list's own has gone
            if number > 2 and not stat.S_ISFIFO(os.fstat(number).st_mode):
                os.dup2(nothing, number, inheritable=False)
