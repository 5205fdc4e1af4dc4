"""Files of a checkpoint, written by ranks that stay in step with one another where the disk is full.

Role: a rank opens `writing(engines)` around what it saves, and sends every file of its own through `Writing.write`;
DeepSpeed's go there too. A file that can't be written is noted and nothing more is written, but every collective on the
way is entered as before: a rank that left one would make its peers wait, and end the run for want of a checkpoint.
What was written is on the disk when `write` returns, not only in this node's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from rlfuse.engines.trainer.offloading import on_device
from rlfuse.files import sync_all


class Writing:
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
def writing(engines: Iterable[DeepSpeedEngine] = ()) -> Iterator[Writing]:
    """Of one checkpoint of these engines, which are on the device for its length.

    Files of their `save_checkpoint` are written through it.
    """
    files, engines = Writing(), list(engines)
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(on_device(engine))
            stack.enter_context(_guarded(engine, files))
        yield files


@contextmanager
def _guarded(engine: DeepSpeedEngine, files: Writing) -> Iterator[None]:
    engine.checkpoint_engine = _Guarded(engine.checkpoint_engine, files)
    engine._copy_recovery_script = lambda *_: None  # of no use beside huggingface/, and a file nobody guards
    try:
        yield
    finally:
        engine.checkpoint_engine = engine.checkpoint_engine.wrapped
        del engine._copy_recovery_script


class _Guarded:
    """DeepSpeed's writer of checkpoint files, as it was but for failures."""

    def __init__(self, wrapped: Any, files: Writing):
        self.wrapped, self._files = wrapped, files

    def save(self, state_dict: Any, path: str) -> None:
        self._files.write(path, lambda: self.wrapped.save(state_dict, path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._files.write(path, lambda: self.wrapped.makedirs(path, exist_ok=exist_ok))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
