"""Compile and load DeepSpeed's operations, one process per machine at a time.

torch's file `lock` in an extension's folder names no owner and outlives a killed process, so `rlfuse.lock` (a flock
with the owner's name) guards the folder; its holder removes torch's stale locks. torch writes at every load, so
operations in a folder of another user are copied to this user's cache folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
import ray

from rlfuse.cluster import watchdog
from rlfuse.cluster.remote import all_of, call
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError
from rlfuse.progress import done_line
from rlfuse.user_folders import cache_folder, home, is_writable

LOCK = "rlfuse.lock"
STALE_S = 60.0
"""Age in seconds after which another program's lock is stale, if no process of this host uses its folder."""
OP_FILES = {"ShareMemCommBuilder": "deepspeed_shm_comm.so", "CPUAdamBuilder": "cpu_adam.so"}
"""DeepSpeed's op builder -> the file that it compiles."""
REPORT_AFTER_S = 5.0
"""Seconds after which a wait is reported."""


def builders(device: str, offload_optimizer: bool) -> list[str]:
    """Return the DeepSpeed op builders that a rank needs on `cpu` or `cuda`; keys of `OP_FILES`."""
    needed = {"ShareMemCommBuilder": device == "cpu", "CPUAdamBuilder": offload_optimizer}
    return [name for name, is_needed in needed.items() if is_needed]


async def load_on_all_ranks(ranks: Sequence[ray.actor.ActorHandle], config: Config, device: str) -> None:
    """Load the operations on every rank. EngineError if one waits longer than cluster.timeout_s."""
    limit_s, reported = config.cluster.timeout_s, set[str]()
    until = time.monotonic() + limit_s

    async def one(name: str, rank: ray.actor.ActorHandle) -> None:
        while why := await call(rank.load_extensions.remote(), name, "load DeepSpeed's operations", limit_s):
            if time.monotonic() > until:
                raise EngineError(f"{name} waited for {limit_s:g} s (cluster.timeout_s): {why}")
            if why not in reported:
                reported.add(why)
                watchdog.say(f"{name}: {why}")

    needed, began = [OP_FILES[name] for name in builders(device, config.actor.offload_optimizer)], time.monotonic()
    missing = [name for name in needed if not is_compiled(name)]
    if missing:
        watchdog.say("Compiling DeepSpeed's operations: about a minute, once per machine")
    await all_of([one(f"trainer/{i}", rank) for i, rank in enumerate(ranks)])
    if missing:
        watchdog.say(done_line("DeepSpeed's operations", time.monotonic() - began))


def load(operations: Callable[[], Any], patience_s: float = REPORT_AFTER_S) -> str | None:
    """Run `operations` with the folder locked; return None, or a reason to call again: a wait or a removed stale lock.

    EngineError if the folder's file system does not support locks.
    """
    given, root, deadline = configured_folder(), extensions_folder(), time.monotonic() + patience_s
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+") as own:
        while not _locked(own):
            if time.monotonic() > deadline:
                owner = _owner(own) or "another process"
                return f"DeepSpeed's operations are being compiled or loaded by {owner} ({own.name})"
            time.sleep(0.05)
        killed = _owner(own)
        for lock in _locks(root):
            while why := _waits_for(lock, killed):
                if time.monotonic() > deadline:
                    return f"DeepSpeed's operations: {why}"
                time.sleep(0.05)
            with suppress(FileNotFoundError):
                lock.unlink()
                return f"{lock} was left behind by {killed or 'a process'} that has ended: removed"
        if root != given:
            _copy_compiled(given, root)
            os.environ["TORCH_EXTENSIONS_DIR"] = str(root)
        own.truncate(0)
        own.write(f"process {os.getpid()} of {socket.gethostname()}")
        own.flush()
        try:
            operations()
        finally:
            own.truncate(0)
    return None


def stale_locks() -> list[Path]:
    """Return the locks of killed processes that the next `load` would remove; empty while a run holds the folder."""
    if not (root := extensions_folder()).is_dir():
        return []
    with (root / LOCK).open("a+") as own:
        return [lock for lock in _locks(root) if not _waits_for(lock, _owner(own))] if _locked(own) else []


def extensions_folder() -> Path:
    """Return the folder in which torch stores compiled extensions for this user."""
    given = configured_folder()
    writable = all(map(is_writable, [given, *given.glob("*/")]))
    writable = writable and all(os.access(lock, os.W_OK) for lock in given.glob(LOCK))
    return given if writable else cache_folder() / "torch_extensions"


def is_compiled(file: str) -> bool:
    """Return whether this file of `OP_FILES` exists, for this user or to copy."""
    return any(next(folder.rglob(file), None) for folder in {extensions_folder(), configured_folder()})


def configured_folder() -> Path:
    """Return torch's extensions folder, without importing `torch.utils.cpp_extension`, which takes a second."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", home() / ".cache"))
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or (cache / "torch_extensions").resolve())


def _copy_compiled(given: Path, root: Path) -> None:
    """Copy operations missing in `root` from `given`, except those being compiled."""
    for source in {file.parent for name in OP_FILES.values() for file in given.rglob(name)}:
        if not (source / "lock").exists() and not (root / source.name).exists():
            shutil.copytree(source, root / source.name)


def _locks(root: Path) -> list[Path]:
    """Return torch's lock files."""
    return [*root.glob("*/lock"), *root.glob("*/*/lock")]


def _locked(own: TextIO) -> bool:
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise EngineError(
            f"{own.name} cannot be locked ({error.strerror}). Set TORCH_EXTENSIONS_DIR to a folder on a local disk"
        ) from error
    return True


def _owner(own: TextIO) -> str:
    """Return the process that holds the lock, or was killed while holding it; empty if none."""
    own.seek(0)
    return own.read()


def _waits_for(lock: Path, killed: str) -> str | None:
    """Return why a lock is still valid; None if it is stale or gone."""
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None
    if process := _worker(lock):
        return f"process {process} compiles or loads in {lock.parent}"
    if killed or age > STALE_S:
        return None
    return f"{lock} may belong to another host; waiting until it is {STALE_S:g} s old. Remove it if no process compiles"


def _worker(lock: Path) -> int | None:
    """Return a process of this host that has the lock open (its owner) or runs in its folder (a compiler)."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.path.realpath(f"/proc/{process.pid}/cwd") == str(lock.parent.resolve()):
                return process.pid
            for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
                if os.path.realpath(descriptor.path) == str(lock.resolve()):
                    return process.pid
    return None
