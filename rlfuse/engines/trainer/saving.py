"""Checkpoint files of a rank; neither a slow nor a full disk must stop the rank's collectives.

After the first failure nothing more is written, but the rank still enters every collective, so that its peers do not
wait for it. Files are synced to disk when `write` returns, or in the background if they are staged in shared memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlfuse.cluster import host_memory, scratch
from rlfuse.engines.trainer.offloading import on_device
from rlfuse.files import sync_all

REFERENCE = Path("ref", "huggingface")
"""Folder of a synchronized reference policy within a checkpoint."""
ROOM = 2.0
"""Free memory that staging needs, relative to the size of the files: ranks on GPUs first copy a model's state to the
host."""


class CheckpointWriter:
    """Writer of this rank's checkpoint files; `problem` describes the first failure, None if there is none."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def write(self, path: Path | str, action: Callable[[], Any]) -> None:
        """Run `action`, which writes `path`, and sync the file; no-op after a failure."""
        if self.problem is None:
            try:
                action()
                sync_all(Path(path))
            except Exception as error:  # torch and safetensors raise their own types for a full disk
                self.problem = _describe(path, error)

    def probe(self, folder: Path, rank: int) -> None:
        """Create and remove a file in `folder` to check that it is writable."""
        file = folder / f"rank_{rank}"
        self.write(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        self.write(file, file.touch)
        self.write(folder, lambda: file.unlink(missing_ok=True))


class StagedFiles:
    """Checkpoint files that a rank writes to shared memory and copies to the disk in a thread, while it trains."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copying: Future[str | None] | None = None

    @contextmanager
    def folder(self, target: Path, size: int) -> Iterator[Path]:
        """Yield the folder to write to, whose files are then copied to `target`: in shared memory if there is room.

        `target` must exist once files are written. `size`: bytes of the files, of all ranks of this host.
        """
        scratch.sweep(scratch.CHECKPOINT)  # folders of killed ranks take the room that is measured next
        if min(host_memory.free_bytes(), shutil.disk_usage(scratch.SHARED_MEMORY).free) < ROOM * size:
            yield target
            return
        staged, lock = scratch.make(scratch.CHECKPOINT)
        files = staged / "files"  # not the folder of the lock
        try:
            files.mkdir()
            yield files
        except BaseException:
            scratch.remove(staged)
            lock.close()
            raise
        self._copying = self._thread.submit(_move, files, target, staged, lock)

    def is_copying(self) -> bool:
        copying = self._copying
        return copying is not None and not copying.done()

    def problem(self) -> str | None:
        """Wait for the files, and describe the first failure; None if there was none."""
        copying, self._copying = self._copying, None
        return copying.result() if copying else None


def _move(files: Path, target: Path, staged: Path, lock: Any) -> str | None:
    """Copy `files` to `target` and sync them; remove `staged` and release its lock. Return the first failure."""
    writer = CheckpointWriter()
    try:
        for path in sorted(files.rglob("*")):
            own = target / path.relative_to(files)
            if path.is_dir():
                own.mkdir(exist_ok=True)  # without parents: a folder that the driver has removed stays removed
            else:
                writer.write(own, lambda path=path, own=own: shutil.copyfile(path, own))
                path.unlink()
    except OSError as error:
        return _describe(target, error)
    finally:
        scratch.remove(staged)
        lock.close()
    return writer.problem


def _describe(path: Path | str, error: Exception) -> str:
    return f"{path}: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


@contextmanager
def checkpoint_writer(models: Iterable[Any] = ()) -> Iterator[CheckpointWriter]:
    """Yield the writer of one checkpoint; the models are on the device for the block."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(on_device(model))
        yield CheckpointWriter()
