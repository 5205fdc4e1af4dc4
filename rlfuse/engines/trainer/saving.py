"""Checkpoint files of a rank; a full disk must not stop the rank's collectives.

Role: a rank saves within `checkpoint_writer(models)` and writes every file with `CheckpointWriter.write`. After the
first failure nothing more is written, but the rank still enters every collective, so that its peers do not wait for it.
Files are synced to disk when `write` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlfuse.engines.trainer.offloading import on_device
from rlfuse.files import sync_all

REFERENCE = Path("ref", "huggingface")
"""Folder of a synchronized reference policy within a checkpoint."""


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
                self.problem = f"{path}: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"

    def probe(self, folder: Path, rank: int) -> None:
        """Create and remove a file in `folder` to check that it is writable."""
        file = folder / f"rank_{rank}"
        self.write(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        self.write(file, file.touch)
        self.write(folder, lambda: file.unlink(missing_ok=True))


@contextmanager
def checkpoint_writer(models: Iterable[Any] = ()) -> Iterator[CheckpointWriter]:
    """Yield the writer of one checkpoint; the models are on the device for the block."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(on_device(model))
        yield CheckpointWriter()
