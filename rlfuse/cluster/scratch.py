"""Files outside of run folders, with their owners and their cleanup.

    /dev/shm/rlfuse-kv-*          an engine's KV caches and sockets    engines.vllm.kv_transfer.store.KVCacheStore
    /dev/shm/rlfuse-weights-*     the buckets of a weight transfer     engines.weights.staging.WeightStaging
    /dev/shm/rlfuse-embeddings-*  a node's embeddings of clips         video.cache.EmbeddingCache
    /dev/shm/rlfuse-checkpoint-*  a rank's files of a checkpoint       engines.trainer.saving.StagedFiles
    {tmp}/rlfuse-run-*            Ray's session and temporary files of a driver and its processes
    /dev/shm/{sem.mp-,psm_,...}   semaphores and messages of libraries, recorded by `attach` in a folder above

The creator of a folder holds a lock on it. Once the lock is released, the next creator of the same kind removes the
folder and all files recorded in it. Only folders of this user are removed, and only those files of libraries that are
recorded by boot, file system and inode.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

import psutil

from rlfuse.clock import BOOT

SHARED_MEMORY = Path("/dev/shm")
RUN = "rlfuse-run-"
KV, WEIGHTS, EMBEDDINGS, CHECKPOINT = "rlfuse-kv-", "rlfuse-weights-", "rlfuse-embeddings-", "rlfuse-checkpoint-"
KINDS = KV, WEIGHTS, EMBEDDINGS, CHECKPOINT
LIBRARIES = re.compile(r"sem\.mp-|psm_|vllm_dist")
"""Python's semaphores and shared blocks, and vLLM's shared memory between the processes of an engine."""
LONGEST_ROOT = 18
"""Maximum characters of the root: Ray's socket paths are 89 longer, and the system allows 107."""
END_S = 10.0
LAST = -200
"""Exit priority, after multiprocessing removes its own temporary folder at -100."""


def make(prefix: str, root: Path = SHARED_MEMORY) -> tuple[Path, TextIO]:
    """Create a folder with its lock. It is removed by `sweep` once the lock is closed or its owner has died."""
    sweep(prefix, root)
    while True:  # a concurrent sweep may have removed the folder before it was locked
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        if held := _lock(folder, "w"):
            return folder, held


def sweep(prefix: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the folders of dead processes and return them."""
    found = []
    for folder, held in _abandoned(prefix, root):
        _end_processes(folder)
        remove(folder)
        held.close()
        found.append(folder)
    return found


def abandoned(prefix: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """Return the folders that `sweep` would remove."""
    found = []
    for folder, held in _abandoned(prefix, root):
        held.close()
        found.append(folder)
    return found


def attach(folder: Path, files: Iterable[Path]) -> None:
    """Record files of libraries that must be removed with the folder."""
    for file in files:
        with suppress(FileExistsError, FileNotFoundError):
            (folder / _identity(file)).symlink_to(file)


def attached(folder: Path) -> list[Path]:
    """Return the recorded files that still exist; new files with the same name do not count."""
    found = []
    for link in folder.glob(f"{BOOT}-*"):
        with suppress(OSError):
            if link.name == _identity(link.readlink()):
                found.append(link.readlink())
    return found


def _identity(file: Path) -> str:
    facts = file.lstat()
    return f"{BOOT}-{facts.st_dev:x}-{facts.st_ino}"


def remove(folder: Path) -> None:
    """Remove a folder and the files attached to it."""
    for file in attached(folder):
        file.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@cache
def of_this_process() -> Path:
    """Return the folder of this process, removed at exit; later runs of the process reuse it."""
    folder, held = make(RUN, temporary_root())

    def end() -> None:
        remove(folder)
        held.close()

    Finalize(None, end, exitpriority=LAST)  # not in forks, and after multiprocessing's own cleanup
    return folder


def keep_temporary_files() -> None:
    """Put temporary files of this process and its children into its folder."""
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())  # where Ray looks for clusters to join
    os.environ["TMPDIR"] = tempfile.tempdir = str(of_this_process())


def temporary_root() -> Path:
    """Return the folder for temporary files; /tmp if its path is too long for sockets."""
    root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(root if len(root) <= LONGEST_ROOT else "/tmp")


def held_by(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of libraries in shared memory that these processes have mapped."""
    files, mapped = libraries_files(), set[int]()
    for process in processes:
        mapped |= _mapped(process.pid)
    return {path for path, inode in files.items() if inode in mapped}


def libraries_files() -> dict[Path, int]:
    """Return this user's files of libraries in shared memory -> inode."""
    found = {}
    for entry in os.scandir(SHARED_MEMORY):
        with suppress(FileNotFoundError):
            facts = entry.stat(follow_symlinks=False)
            if LIBRARIES.match(entry.name) and facts.st_uid == os.getuid():
                found[Path(entry.path)] = facts.st_ino
    return found


def _mapped(pid: int) -> set[int]:
    """Return inodes of shared memory that the process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended, or is another user's
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHARED_MEMORY}/" in line}


def _abandoned(prefix: str, root: Path) -> Iterator[tuple[Path, TextIO]]:
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or one that ends just now
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and (held := _lock(folder, "r+")):
                yield folder, held


def _lock(folder: Path, mode: str) -> TextIO | None:
    """Return the folder's locked file; None if another process locked it first."""
    path = folder / "lock"
    try:
        file = path.open(mode)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return None
    return file if path.exists() else None


def _end_processes(folder: Path) -> None:
    """Kill processes of a dead driver, recognised by their TMPDIR."""
    kin = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    until = time.monotonic() + END_S
    while found := [each for each in psutil.process_iter() if each.pid not in kin and _started_with(each, folder)]:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        if time.monotonic() > until:
            return
        time.sleep(0.02)


def _started_with(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):  # it has ended, a zombie too
        return process.uids().real == os.getuid() and process.environ().get("TMPDIR") == str(folder)
    return False
