"""Files of a checkpoint, written by ranks that stay in step with one another where the disk is full.

Role: a rank opens `checkpoint_writer(models)` around what it saves, and sends every file through `CheckpointWriter.write`. A file that
can't be written is noted and nothing more is written, but every collective on the way is entered as before: a rank that
left one would make its peers wait, and end the run for want of a checkpoint. What was written is on the disk when
`write` returns, not only in this node's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlfuse.engines.trainer.offloading import on_device
from rlfuse.files import sync_all


class CheckpointWriter:
    """What this rank could not write: `problem` is None while all is well."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def write(self, path: Path | str, action: Callable[[], Any]) -> None:
        """Do `action`, which writes `path`, unless something failed before."""
        if self.problem is None:
            try:
                action()
                sync_all(Path(path))
            except Exception as error:  # torch and safetensors have their own for a full disk
                self.problem = f"{path}: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"

    def probe(self, folder: Path, rank: int) -> None:
        """Write and remove a file of this rank in `folder`."""
        file = folder / f"rank_{rank}"
        self.write(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        self.write(file, file.touch)
        self.write(folder, lambda: file.unlink(missing_ok=True))


@contextmanager
def checkpoint_writer(models: Iterable[Any] = ()) -> Iterator[CheckpointWriter]:
    """Of one checkpoint of these models, which are on the device for its length."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(on_device(model))
        yield CheckpointWriter()
