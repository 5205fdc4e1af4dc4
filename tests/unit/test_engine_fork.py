"""Forked engine processes share no resources with their actor and end with it; otherwise, vLLM's method is used."""

import fcntl
import gc
import inspect
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import psutil
import pytest
import ray

from rlfuse.cluster import child_processes
from rlfuse.engines.vllm import engine_fork
from rlfuse.engines.vllm.engine_fork import EngineFork, ForkingContext, can_fork, forking

ENDLESS = """
import time
from rlfuse.engines.vllm.engine_fork import ForkingContext
child = ForkingContext().Process(target=time.sleep, args=(600,))
child.start()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """Set up this process like an actor; return (its end of a connection, the other end, a locked file)."""
    ours, theirs = socket.socketpair()
    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(ray._private.worker.global_worker, "_is_connected", True)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    gc.callbacks.append(callback := lambda *_: None)
    gc.disable()
    yield ours, theirs, lock
    gc.enable()
    gc.callbacks.remove(callback)
    signal.signal(signal.SIGUSR1, before)


def test_a_fork_inherits_no_resources_of_its_actor(actor):
    ours, theirs, lock = actor
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def look():
        files = {number: os.readlink(f"/proc/self/fd/{number}") for number in (ours.fileno(), lock.fileno())}
        handlers = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGPIPE)
        gc.unfreeze()
        sending.send(
            (files, handlers, gc.callbacks, gc.isenabled(), gc.get_freeze_count() > 1000, ray.is_initialized())
        )
        lock.close()
        sending.send(len(os.listdir("/proc/self/fd")))
        signal.pause()

    child = ForkingContext().Process(target=look)
    try:
        child.start()
        assert receiving.poll(60)
        files, handlers, callbacks, collects, keeps, connected = receiving.recv()
        assert set(files.values()) == {"/dev/null"}
        assert handlers == (signal.SIG_DFL, signal.SIG_IGN)
        assert (callbacks, collects, keeps, connected) == ([], True, True, False)
        assert receiving.recv() > 4, "descriptors stay reserved"
        ours.close()
        theirs.settimeout(30)
        assert theirs.recv(1) == b"", "the peer sees the closed connection"
        lock.close()
        with open(lock.name) as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert child.is_alive()
    finally:
        child.kill()
        child.join(30)
    assert child.exitcode == -signal.SIGKILL


def test_a_fork_ends_with_its_actor():
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True) as actor:
        assert psutil.pid_exists(int(actor.stdout.readline()))
        actor.kill()
        assert actor.communicate(timeout=30)[0] == "", "no process holds their output open"


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_garbage_of_graph_capture_is_collected_in_a_fork_but_not_that_of_its_actor():
    from vllm.utils import gc_utils

    runner = Path(gc_utils.__file__).parents[1] / "v1" / "worker" / "gpu_model_runner.py"
    assert "from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture" in runner.read_text()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    gc.disable()
    of_actor = cycle()

    def capture():
        nonlocal of_actor
        actors, at_capture = of_actor(), cycle()
        before = gc.get_freeze_count()
        held = at_capture()
        with gc_utils.freeze_gc_for_cudagraph_capture():
            collects = gc.isenabled()
        del held, actors
        gc.unfreeze()
        gc.collect()
        frozen = gc.get_freeze_count() == before
        sending.send((collects, gc.isenabled(), frozen, at_capture() is None, of_actor() is None))

    child = ForkingContext().Process(target=capture)
    try:
        child.start()
        assert receiving.poll(60) and receiving.recv() == (False, True, True, True, False)
    finally:
        gc.enable()
        child.kill()
        child.join(30)


@pytest.mark.slow
def test_an_actor_on_cpus_has_imported_the_worker_of_its_forks():
    """Import the worker before vLLM replaces Triton kernels, which it does only in imported modules."""
    code = """
import os, sys
from rlfuse.engines.vllm.importing import CPU_ENVIRONMENT, import_vllm
os.environ.update(CPU_ENVIRONMENT)
import_vllm()
before = set(sys.modules)
from vllm.platforms import current_platform
from vllm.v1.worker import block_table, cpu_worker
current_platform.register_triton_kernel_overrides()
print(type(block_table.ComputeSlotMappingKernel.kernel).__name__, "vllm.v1.worker.cpu_worker" in before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["KernelOverride", "True"], run.stderr


class Link:
    pass


def cycle():
    """Return a weak reference to an object in a reference cycle."""
    link = Link()
    link.link = link
    return weakref.ref(link)


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_engines_fork_if_no_device_is_open_and_use_vllm_method_otherwise(monkeypatch, tmp_path):
    """Check that vLLM's process manager and model registry call the patched functions."""
    from vllm.model_executor.models import registry
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    run_in_subprocess = registry._run_in_subprocess
    assert "get_mp_context" in utils.CoreEngineProcManager.__init__.__code__.co_names
    makers = multiproc_executor.WorkerProc.make_worker_process, multiproc_executor.MultiprocExecutor._init_executor
    assert all("get_mp_context" in inspect.unwrap(each).__code__.co_names for each in makers)
    inspect_class = inspect.unwrap(registry._LazyRegisteredModel.inspect_model_cls)
    assert "_run_in_subprocess" in inspect_class.__code__.co_names
    with forking("cpu", {}):
        assert isinstance(multiproc_executor.get_mp_context(), ForkingContext)
        context = utils.get_mp_context()
        assert context.get_start_method() == "fork" and context.Process is EngineFork
        assert registry._run_in_subprocess(os.getpid) == os.getpid()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)  # vLLM sets it if it cannot fork
    with forking("cuda", {}):
        assert isinstance(utils.get_mp_context(), ForkingContext) and isinstance(
            multiproc_executor.get_mp_context(), ForkingContext
        )
        assert registry._run_in_subprocess is run_in_subprocess, "a model class may query CUDA devices"
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(engine_fork, "DRIVER", re.compile(str(tmp_path)))
        with (tmp_path / "nvidiactl").open():
            assert not isinstance(utils.get_mp_context(), ForkingContext)
    with forking("cuda", {"distributed_executor_backend": "ray"}):
        assert not isinstance(utils.get_mp_context(), ForkingContext)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with forking("cuda", {}):
        assert utils.get_mp_context().get_start_method() == "spawn", "the user's setting has precedence"
    assert utils.get_mp_context is get_mp_context and registry._run_in_subprocess is run_in_subprocess


@pytest.mark.parametrize(
    ("device", "arguments", "threads", "files", "expected"),
    [
        ("cpu", {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, None, ["/dev/nvidiactl"], True),
        ("cuda", {"tensor_parallel_size": 1}, "1", ["/dev/null", "/home/nvidia/log", "/proc/1/fd/pipe:[5]"], True),
        ("cuda", {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, "1", [], True),
        ("cuda", {"distributed_executor_backend": "ray"}, "1", [], False),
        ("cuda", {"distributed_executor_backend": "mine.Executor"}, "1", [], False),
        ("cuda", {"pipeline_parallel_size": 2}, "1", [], False),
        ("cuda", {"distributed_executor_backend": "mp", "numa_bind": True}, "1", [], False),
        ("cuda", {"data_parallel_size": 2}, "1", [], False),
        ("cuda", {}, "8", [], False),
        ("cuda", {}, None, [], False),
        ("cuda", {}, "1", ["/dev/nvidiactl"], False),
        ("cuda", {}, "1", ["/dev/nvidia0"], False),
        ("cuda", {}, "1", ["/dev/nvidia-uvm"], False),
        ("cuda", {}, "1", ["/dev/dxg"], False),
    ],
)
def test_an_engine_forks_only_without_cuda_ray_or_extra_threads(device, arguments, threads, files, expected):
    assert can_fork(device, arguments, threads, files) is expected


def test_a_thread_that_ends_while_threads_are_bound_is_ignored(monkeypatch):
    bound, thread_ids = [], [thread.id for thread in psutil.Process().threads()]

    def bind(thread, cores):
        bound.append((thread, cores))
        if len(bound) == 1:
            raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    child_processes.bind(0)
    assert {(thread, 0) for thread in thread_ids} <= {(thread, *cores) for thread, cores in bound}
