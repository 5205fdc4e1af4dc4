"""Find what crashed and killed runs left behind, for `rlfuse runs clean`.

Nothing of a run that may be alive, of a living process or of another user is listed, nor any complete checkpoint, log
or record.
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
"""A run without a status may live if it has written something since."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something to remove."""

    path: Path
    why: str
    bytes: int

    @classmethod
    def of(cls, path: Path, why: str) -> Leftover:
        return cls(path, why, sum(map(_size, (path, *path.rglob("*"), *scratch.attached(path)))))


def find_leftovers(runs: Iterable[Path]) -> list[Leftover]:
    """In these runs' folders, and outside them on this host."""
    return [*(each for run in runs for each in leftovers_of_run(run)), *leftovers_of_machine()]


def leftovers_of_run(folder: Path) -> Iterator[Leftover]:
    """In a run's folder, unless it goes on: what its next start would remove or make again."""
    if may_be_running(folder):
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.lstat().st_uid != os.getuid():
            continue
        if PARTIAL.fullmatch(path.name) and not (path / MARKER).exists():
            yield Leftover.of(path, "a checkpoint that never got whole")
        elif ASIDE.fullmatch(path.name):
            yield Leftover.of(path, "half written")
        elif path.name == status.RESERVED:
            yield Leftover.of(path, "reserved for the end of the run")
        elif path.name == "text_parts":
            yield Leftover.of(path, "copied from the model, and copied again when needed")
    if (slates := folder / "stacks" / "processes").is_dir():
        yield Leftover.of(slates, "where processes stood that have ended")


def may_be_running(folder: Path) -> bool:
    """Whether its run goes on here, or may do so elsewhere, or nobody can tell."""
    if (found := status.read(folder)) is not None:
        return status.state_now(folder, found) == "running"
    newest = max((file.stat().st_mtime for file in folder.iterdir() if file.is_file()), default=0.0)
    return (folder / status.FILE).exists() or time.time() - newest < UNKNOWN_S


def leftovers_of_machine() -> Iterator[Leftover]:
    """Outside run folders, on this host."""
    for kind in scratch.KINDS:
        for folder in scratch.abandoned(kind):
            yield Leftover.of(folder, "its process has ended")
    for folder in scratch.abandoned(scratch.RUN, scratch.temporary_root()):
        yield Leftover.of(folder, "its driver has ended")
    from rlfuse.engines.deepspeed.deepspeed_ops import stale_locks  # imports Ray, which only this needs

    for lock in stale_locks():
        yield Leftover.of(lock, "whoever compiled there has ended")


def remove(path: Path) -> bool:
    """Whether it is gone."""
    prefix = next((kind for kind in (*scratch.KINDS, scratch.RUN) if path.name.startswith(kind)), None)
    if prefix is not None:
        scratch.sweep(path.name, path.parent)  # only if its process is dead still; with what it owns
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
    return not path.exists()


def _size(path: Path) -> int:
    with suppress(OSError):  # gone meanwhile
        return path.lstat().st_size if path.is_file() else 0
    return 0
