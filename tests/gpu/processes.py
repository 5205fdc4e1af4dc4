"""Runs test bodies in separate processes like ranks, each with a device and a process group.

Role: `in_ranks` runs a body in `count` processes and returns their results; `connected` runs one with a connection to
this process. Separate processes also release all that libraries keep on the device.
Waits: for every process, at most `TIMEOUT_S`; one that dies is an error with its exit code.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing  # connections can send tensors of shared memory

TIMEOUT_S = 240
PRELOADED = ("rlfuse.engines.deepspeed.optimizer", "rlfuse.engines.pipeline.stages")


def in_ranks(count, body, device, *arguments):
    """Run `body(device, *arguments)` in `count` ranks of one process group; return their results."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        started = [_start(_rank, device, rank, count, store, body, device, *arguments) for rank in range(count)]
        try:
            deadline = time.monotonic() + TIMEOUT_S
            return [_answer(*each, deadline) for each in started]
        finally:
            _end(started)


@contextmanager
def connected(body, device, *arguments):
    """Yield a connection to a process that runs `body(connection, device, *arguments)`; the body has to return."""
    started = _start(_run_connected, device, body, device, *arguments)
    process, connection = started
    try:
        yield connection
        _answer(process, connection, time.monotonic() + TIMEOUT_S)
    finally:
        _end([started])


def received(connection):
    """Return the next message; raise if none arrives in time or the other process has failed."""
    if not connection.poll(TIMEOUT_S):
        raise TimeoutError(f"no message from the other process within {TIMEOUT_S} s")
    message = connection.recv()
    if isinstance(message, _Failure):
        raise RuntimeError(message.text)
    return message


class _Failure:
    def __init__(self, text):
        self.text = text


class _Result:
    def __init__(self, value):
        self.value = value


def _start(target, device, *arguments):
    # A process that has initialised CUDA must not be forked; on CPUs forking saves five seconds of imports.
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    here, there = context.Pipe()
    process = context.Process(target=_reporting, args=(there, target, arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def _reporting(connection, target, arguments):
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # raised by torch for calls in DeepSpeed; keeps the output readable
    try:
        connection.send(_Result(target(connection, *arguments)))
    except BaseException:
        connection.send(_Failure(traceback.format_exc()))
        raise


def _answer(process, connection: Connection, deadline):
    try:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"a rank did not end within {TIMEOUT_S} s")
        message = connection.recv()
    except EOFError:
        process.join(10)
        raise RuntimeError(f"a rank died with exit code {process.exitcode}") from None
    if isinstance(message, _Failure):
        raise RuntimeError(message.text)
    return message.value


def _end(started):
    for process, connection in started:
        connection.close()
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


def _rank(_, rank, count, store, body, *arguments):
    """Run a body in a process group: NCCL for one rank, gloo for several, since NCCL allows one rank per GPU."""
    device = arguments[0]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    alone = device == "cuda" and count == 1
    bound = torch.device("cuda", 0) if alone else None
    limit, backend = timedelta(seconds=TIMEOUT_S), "nccl" if alone else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=limit, device_id=bound
    )
    try:
        return body(*arguments)
    finally:
        dist.destroy_process_group()


def _run_connected(connection, body, *arguments):
    torch.set_num_threads(1)
    return body(connection, *arguments)


def copying(connection, device):
    """Copy and acknowledge every received tensor until None arrives; a body for `connected`."""
    while (shared := received(connection)) is not None:
        float(shared.clone()[-1])  # waits for the device
        del shared
        connection.send(True)


def allocated(device):
    """Return the bytes of tensors on the device; 0 on a CPU, where they are not counted."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0
