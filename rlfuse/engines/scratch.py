"""Folders in shared memory that a killed process does not leave behind for ever.

Role: an engine's KV caches (`migration.Shelf`) and a push's buckets (`weights_depot.Depot`) lie in such folders. Its
maker holds a lock on each; whoever makes the next removes those of its kind whose maker has died, with what `own` put
into them. Waits for nothing.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")


def make(prefix: str, root: Path = SHARED_MEMORY) -> tuple[Path, Any]:
    """A new folder and its lock: it is the maker's until the lock is closed, and swept when the maker has died."""
    sweep(prefix, root)
    while True:  # one that sweeps may have taken the folder for a dead process's
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        if held := _lock(folder):
            return folder, held


def sweep(prefix: str, root: Path = SHARED_MEMORY) -> None:
    """Remove the folders of processes that were killed."""
    for folder in root.glob(f"{prefix}*"):
        if (folder / "lock").exists() and (held := _lock(folder)):
            remove(folder)
            held.close()


def own(folder: Path, files: Iterable[Path]) -> None:
    """These go with the folder: a library made them for its maker, and removes them only where that ends in order."""
    for file in files:
        (folder / file.name).symlink_to(file)


def remove(folder: Path) -> None:
    """Remove a folder and what it owns."""
    for link in folder.glob("*"):
        if link.is_symlink():
            link.readlink().unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> Any:
    """The folder's lock, held while the returned file is open and its process lives; None if another had it first."""
    path = folder / "lock"
    try:
        file = path.open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return None
    return file if path.exists() else None
