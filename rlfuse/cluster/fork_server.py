"""Fork Ray's workers on CPU hosts from one process that has imported their modules.

    driver -- starts, keeps its stdin open --> fork server: imports, then waits --+ forks
    raylet -- starts --> forked_worker.py -- description of the worker -----------+------> worker

A worker equals the one that Ray would start. If environment variables that libraries read at import differ, or the
server has ended, Ray's own script runs. The server has one thread, has used neither OpenMP nor a device, and has not
imported Ray; it ends with its driver. Not used on GPUs: CUDA does not survive a fork.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlfuse.cluster import scratch
from rlfuse.cluster.forked_worker import FORKED, FORKING, SERVER, peer, started_with
from rlfuse.cluster.garbage import importing
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.config.schema import Config

READ_BY_IMPORTS = re.compile("PYTHON|LD_PRELOAD|GLIBC_|(OMP|KMP|MKL|OPENBLAS|HF|TRANSFORMERS|TORCH)_")
"""Variables that libraries read once, at import."""
MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
"""Variables that glibc reads at process start -> the `mallopt` parameter that changes them later."""
GPUS = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
REQUEST_S = 5.0
STREAMS = 3


def start_early(config: Config, imports: str) -> None:
    """Start the server before other imports, if all workers will run on this host's CPUs; see `start`."""
    device = config.cluster.device
    here = device == "cpu" or (device == "auto" and not any(map(Path.exists, GPUS)))
    if here and config.cluster.ray_address is None:
        start(imports)


def start(imports: str) -> None:
    """Start the fork server of this process, unless it runs. `imports`: module that imports the workers' libraries."""
    folder = scratch.of_this_process()
    path = folder / "fork_server"
    if os.environ.get(SERVER) == str(path):
        return
    with path.with_suffix(".log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(path), imports],
            env=os.environ | worker_environment("cpu") | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Ctrl-C must reach only the driver. No new session: with autogroup scheduling, engines in another session
            # could starve the driver while they decode.
            process_group=0,
        )
    os.environ[SERVER] = str(path)
    atexit.register(_end, server)


def _end(server: subprocess.Popen) -> None:
    server.kill()  # it may still be importing; no cleanup is needed
    server.wait()


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A worker that Ray would start, see `forked_worker.request`."""

    streams: list[int]
    words: list[str]
    environment: dict[str, str]
    folder: str
    oom_score_adj: str
    open_files: list[int]

    def run(self) -> None:
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.setpgid(0, 0)  # a raylet kills the process group of a worker
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(PermissionError):  # the server's score may be higher
            Path("/proc/self/oom_score_adj").write_text(self.oom_score_adj)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files[0], self.open_files[1]))  # Ray has raised it
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        _reset_shared_state()
        sys.argv = self.words
        runpy.run_path(self.words[0], run_name="__main__")


class ForkServer:
    """The process that forks workers."""

    def __init__(self, path: Path, imports: str):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does, for its workers too
        self._imported_with = _read_by_imports(os.environ)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)  # requests during the imports wait
        with importing():
            importlib.import_module(imports)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for, so avoid zombies

    def serve(self) -> WorkerRequest | None:
        while sys.stdin not in (ready := select.select([self._listener, sys.stdin], [], [])[0]):
            if self._listener in ready and (spec := self._answer()):
                self._listener.close()
                return spec
        return None

    def _answer(self) -> WorkerRequest | None:
        asking, _ = self._listener.accept()
        streams: list[int] = []
        with asking, suppress(OSError, ValueError):  # the client disconnected
            if peer(asking)[1] != os.getuid():
                return None
            asking.settimeout(REQUEST_S)
            _, streams, _, _ = socket.recv_fds(asking, 1, STREAMS)
            request = json.load(asking.makefile("rb"))
            changed = started_with(os.getpid()) | request.pop("environment")
            environment = {name: value for name, value in changed.items() if value is not None}
            spec = WorkerRequest(streams, environment=environment, **request)
            differing = _read_by_imports(spec.environment).items() ^ self._imported_with.items()
            if differing:
                print("declined for", sorted(dict(differing)), flush=True)
            else:
                asking.sendall(FORKING)
                if os.fork() == 0:
                    return spec
                asking.sendall(FORKED)
        for stream in streams:
            os.close(stream)
        return None


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_BY_IMPORTS.match(name)}


def _reset_shared_state() -> None:
    """Reset state that forks would share: random seeds and settings from environment variables."""
    import numpy as np
    import torch._dynamo

    np.random.seed()
    torch.seed()
    for name in MALLOC.keys() & os.environ.keys():
        ctypes.CDLL(None).mallopt(MALLOC[name], int(os.environ[name]))
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def main(path: Path, imports: str) -> None:
    """Run the server; in a fork, run the requested worker."""
    spec = ForkServer(path, imports).serve()
    if spec is None:
        os._exit(0)  # skip the exit handlers of libraries
    spec.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
