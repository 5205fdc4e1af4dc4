"""Find leftovers of crashed and killed runs, for `rlfuse runs clean`.

Files of possibly running jobs, live processes and other users are never listed, nor complete checkpoints, logs and
results.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlfuse.cluster import scratch
from rlfuse.run_folder import status
from rlfuse.run_folder.checkpoints import MARKER

PARTIAL = re.compile(r"global_step_\d+(\.partial)?")
ASIDE = re.compile(r"\..+\.part")
UNKNOWN_S = 3600.0
"""A run without a status counts as possibly running for so long after its last write."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """File or folder to remove."""

    path: Path
    why: str
    bytes: int

    @classmethod
    def of(cls, path: Path, why: str) -> Leftover:
        return cls(path, why, sum(map(_size, (path, *path.rglob("*"), *scratch.attached(path)))))


def find_leftovers(runs: Iterable[Path]) -> list[Leftover]:
    """Return the leftovers in these run folders and elsewhere on this host."""
    return [*(each for run in runs for each in leftovers_of_run(run)), *leftovers_of_machine()]


def leftovers_of_run(folder: Path) -> Iterator[Leftover]:
    """Yield leftovers in a run folder that the next start would remove or recreate; nothing if the run may be alive."""
    if may_be_running(folder):
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.lstat().st_uid != os.getuid():
            continue
        if PARTIAL.fullmatch(path.name) and not (path / MARKER).exists():
            yield Leftover.of(path, "incomplete checkpoint")
        elif ASIDE.fullmatch(path.name):
            yield Leftover.of(path, "incomplete file")
        elif path.name == status.RESERVED:
            yield Leftover.of(path, "disk space reserved for the end of the run")
        elif path.name == "text_parts":
            yield Leftover.of(path, "copy of model files, recreated when needed")
    if (stacks := folder / "stacks" / "processes").is_dir():
        yield Leftover.of(stacks, "stacks of ended processes")


def may_be_running(folder: Path) -> bool:
    """Return whether the run may still be running, here or on another host."""
    if (found := status.read(folder)) is not None:
        return status.state_now(folder, found) == "running"
    newest = max((file.stat().st_mtime for file in folder.iterdir() if file.is_file()), default=0.0)
    return (folder / status.FILE).exists() or time.time() - newest < UNKNOWN_S


def leftovers_of_machine() -> Iterator[Leftover]:
    """Yield leftovers outside run folders on this host."""
    for kind in scratch.KINDS:
        for folder in scratch.abandoned(kind):
            yield Leftover.of(folder, "its process has ended")
    for folder in scratch.abandoned(scratch.RUN, scratch.temporary_root()):
        yield Leftover.of(folder, "its driver has ended")
    from rlfuse.engines.deepspeed.deepspeed_ops import stale_locks  # imports Ray, which is needed only here

    for lock in stale_locks():
        yield Leftover.of(lock, "the compiling process has ended")


def remove(path: Path) -> bool:
    """Remove a leftover; return whether it is gone."""
    prefix = next((kind for kind in (*scratch.KINDS, scratch.RUN) if path.name.startswith(kind)), None)
    if prefix is not None:
        scratch.sweep(path.name, path.parent)  # only if its process is still dead; with all attached files
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
    return not path.exists()


def _size(path: Path) -> int:
    with suppress(OSError):  # removed meanwhile
        return path.lstat().st_size if path.is_file() else 0
    return 0
