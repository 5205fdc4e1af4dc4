"""An engine's process that is a fork has nothing of its actor's, and ends with it; GPUs have vLLM's own way."""

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
    """This process as an actor is: (its end of a connection, the other end, a file that it has locked)."""
    ours, theirs = socket.socketpair()
    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(ray._private.worker.global_worker, "_is_connected", True)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    gc.callbacks.append(told := lambda *_: None)
    gc.disable()
    yield ours, theirs, lock
    gc.enable()
    gc.callbacks.remove(told)
    signal.signal(signal.SIGUSR1, before)


def test_a_fork_has_no_file_socket_lock_handler_or_garbage_of_its_actor_and_no_ray(actor):
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
        files, handlers, told, collects, keeps, connected = receiving.recv()
        assert set(files.values()) == {"/dev/null"}
        assert handlers == (signal.SIG_DFL, signal.SIG_IGN)
        assert (told, collects, keeps, connected) == ([], True, True, False)
        assert receiving.recv() > 4, "numbers stay taken"
        ours.close()
        theirs.settimeout(30)
        assert theirs.recv(1) == b"", "the other side hears at once that its peer has gone"
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
        assert actor.communicate(timeout=30)[0] == "", "nobody holds the other end of their output any more"


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_what_the_capture_of_graphs_leaves_in_a_fork_is_collected_and_nothing_of_its_actor():
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
def test_an_actor_on_cpus_has_imported_the_worker_that_its_forks_run():
    """Before vLLM replaces Triton's kernels, which it does in all modules that are there."""
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
    """Return a weak reference to an object that holds itself."""
    link = Link()
    link.link = link
    return weakref.ref(link)


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_engines_are_forks_where_no_device_is_open_and_else_vllm_s_own(monkeypatch, tmp_path):
    """Its manager of processes takes what makes them from the place that is replaced, and the process from that; and
    what looks at a class of models is asked in a place that is replaced."""
    from vllm.model_executor.models import registry
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    look_elsewhere = registry._run_in_subprocess
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
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)  # vLLM sets it where it can't fork
    with forking("cuda", {}):
        assert isinstance(utils.get_mp_context(), ForkingContext) and isinstance(
            multiproc_executor.get_mp_context(), ForkingContext
        )
        assert registry._run_in_subprocess is look_elsewhere, "a class of models may ask for CUDA devices"
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(engine_fork, "DRIVER", re.compile(str(tmp_path)))
        with (tmp_path / "nvidiactl").open():
            assert not isinstance(utils.get_mp_context(), ForkingContext)
    with forking("cuda", {"distributed_executor_backend": "ray"}):
        assert not isinstance(utils.get_mp_context(), ForkingContext)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with forking("cuda", {}):
        assert utils.get_mp_context().get_start_method() == "spawn", "as the user says"
    assert utils.get_mp_context is get_mp_context and registry._run_in_subprocess is look_elsewhere


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
def test_an_engine_is_a_fork_where_neither_cuda_ray_nor_threads_are_lost(device, arguments, threads, files, expected):
    assert can_fork(device, arguments, threads, files) is expected


def test_a_thread_that_ends_while_others_are_bound_to_a_core_is_no_fault(monkeypatch):
    bound, mine = [], [thread.id for thread in psutil.Process().threads()]

    def bind(thread, cores):
        bound.append((thread, cores))
        if len(bound) == 1:
            raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    child_processes.bind(0)
    assert {(thread, 0) for thread in mine} <= {(thread, *cores) for thread, cores in bound}
