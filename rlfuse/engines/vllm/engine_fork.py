"""Start vLLM's engine process as a fork of its actor, which has already imported vLLM: takes a third of the time.

vLLM itself spawns a new process: on CPU hosts because of OpenMP threads (an engine here has one), on GPUs because it
runs in a Ray actor, although a fork is safe until the actor has opened the device (`can_fork`). The fork resets what it
inherits:
- it closes the actor's sockets, files and locks, so that the exit of the actor is noticed;
- it drops the connection to Ray, restores signal handlers and garbage collection, and exits with its actor.
Only the forking thread exists in the child, so no other thread may hold a lock. OpenMP would wait for its threads
forever, hence actors use one (`rollout_env`).
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
    """Process of a forked engine."""

    def run(self) -> None:
        """Detach from the actor, then run the target."""
        _reset_garbage_collection()
        _reset_signal_handlers()
        _close_files()
        ray._private.worker.global_worker.set_is_connected(False)
        ray._raylet.setproctitle(f"VLLM::{self.name}")  # vLLM can't, because Ray has moved the process title
        end_with_parent()
        super().run()


class ForkingContext(ForkContext):
    """Multiprocessing context that starts `EngineFork`."""

    Process = EngineFork


def can_fork(device: str, arguments: Mapping[str, Any], threads: str | None, files: Iterable[str]) -> bool:
    """Return whether an engine with these arguments can be a fork of this process.

    `threads`: number of OpenMP threads; `files`: paths of open files. CUDA and NVML do not survive a fork once they are
    initialised, which opens a device file. An engine with Ray workers needs a connection to Ray.
    """
    if device == "cpu":
        return True
    executor = arguments.get("distributed_executor_backend")
    if executor is None and all(arguments.get(f"{kind}_parallel_size", 1) == 1 for kind in PARALLEL):
        executor = "uni"
    must_spawn = arguments.get("numa_bind") or any(map(DRIVER.match, files))  # vLLM binds only new processes
    return executor in ("uni", "mp") and threads == "1" and not must_spawn


@contextmanager
def forking(device: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Fork engines that start in this context, and their tensor-parallel workers, if `can_fork` allows it. On `cpu`,
    vLLM inspects model classes in this process instead of a new one, so that forks inherit the imports."""
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
        return ForkingContext() if can_fork(device, arguments, threads, opened) else get_mp_context()

    inspect = (lambda function: function()) if device == "cpu" else registry._run_in_subprocess
    with (
        mock.patch.object(utils, "get_mp_context", context),
        mock.patch.object(multiproc_executor, "get_mp_context", context),
        mock.patch.object(registry, "_run_in_subprocess", inspect),
    ):
        yield


def _reset_garbage_collection() -> None:
    """Exclude the actor's objects from garbage collection and drop its callbacks. At shutdown vLLM would unfreeze them
    and collect twice, which takes a quarter of a small engine's CPU time."""
    gc.freeze()
    gc.unfreeze = lambda: None
    if gc_utils := sys.modules.get("vllm.utils.gc_utils"):
        gc_utils.freeze_gc_for_cudagraph_capture = _without_collection
    gc.callbacks.clear()
    gc.enable()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Replace vLLM's context of CUDA graph capture, which freezes objects that nothing would unfreeze here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _reset_signal_handlers() -> None:
    """Restore default signal handlers."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _close_files() -> None:
    """Close all files except standard streams and pipes. Their descriptors then point to /dev/null, because objects may
    still close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the directory listing is already closed
            if number > 2 and not stat.S_ISFIFO(os.fstat(number).st_mode):
                os.dup2(nothing, number, inheritable=False)
