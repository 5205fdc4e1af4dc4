"""Write, publish and find checkpoints in a run folder.

    global_step_N/{actor,critic}/   weights and optimizer; actor/huggingface loads with from_pretrained and vLLM
    global_step_N/run.json          step, position in the data, KL coefficient, number of optimizer steps
    global_step_N/COMPLETE          written last
    latest_checkpointed_iteration.txt

A checkpoint is written as `global_step_N.partial` and renamed once it is complete and the step's rows are on disk, each
flushed before the next, so that a run killed at any moment can resume from the last folder with a marker.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlfuse.errors import ConfigError, NotSaved, RlfuseError
from rlfuse.files import sync, sync_all, write_atomically
from rlfuse.parsing import parse_json

MARKER = "COMPLETE"
LATEST = "latest_checkpointed_iteration.txt"
MIB = 1 << 20
Fill = Callable[[Path], Awaitable[None]]


async def write(
    run: Path, step: int, state: dict[str, Any], fill: Fill, last: int = 0, keep: int | None = None
) -> None:
    """Write a checkpoint by `fill`; `publish` makes it valid. If disk space is short, old checkpoints beyond `keep`, up
    to step `last`, are removed first. Raises NotSaved with the cause."""
    partial = _new_partial(run, step)
    for old in _outdated(run, last, keep):
        if lacks_disk_space(run):
            _remove(old)
    if lacks_disk_space(run):
        raise _not_saved(run, step, None)
    try:
        await _fill(partial, {"step": step, **state}, fill)
        (partial / MARKER).touch()
        sync(partial)
    except Exception as error:
        if isinstance(error, RlfuseError) and not isinstance(error, NotSaved):
            raise
        raise _not_saved(run, step, error) from error
    finally:
        if not (partial / MARKER).exists():
            shutil.rmtree(partial, ignore_errors=True)


async def write_trial(run: Path, state: dict[str, Any], fill: Fill) -> None:
    """Write a checkpoint without weights by `fill` and remove it. Raises NotSaved with the cause."""
    partial = _new_partial(run, 0)
    try:
        await _fill(partial, state, fill)
    except Exception as error:
        if isinstance(error, RlfuseError) and not isinstance(error, NotSaved):
            raise
        raise NotSaved(
            f"Checkpoints can't be written in {run}: {_cause(error)}. This was tested at startup by writing all files "
            "except the weights. Fix the cause and rerun the command."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _new_partial(run: Path, step: int) -> Path:
    for stale in run.glob("global_step_*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    return run / f"global_step_{step}.partial"


async def _fill(partial: Path, state: dict[str, Any], fill: Fill) -> None:
    partial.mkdir(parents=True)
    await fill(partial)
    (partial / "run.json").write_text(json.dumps(state))
    await asyncio.to_thread(sync_all, partial)  # in a thread, as it takes long and workers are monitored meanwhile


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of the published checkpoint of a step."""
    return run / f"global_step_{step}"


def publish(run: Path, step: int, keep: int | None) -> None:
    """Publish the checkpoint of `write`; remove those of later steps, and the oldest beyond `keep`."""
    final = folder_of(run, step)
    for abandoned in later(run, step):  # first, so that `auto` can't select them after a kill
        _remove(abandoned)
    if final.exists():
        _remove(final)
    final.with_name(f"{final.name}.partial").rename(final)
    sync(run)
    for old in complete(run)[:-keep] if keep else []:
        _remove(old)
    write_atomically(run / LATEST, str(step))


def _remove(checkpoint: Path) -> None:
    """Remove the marker first: a kill in between leaves nothing that looks complete."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def lacks_disk_space(run: Path) -> bool:
    """Return whether the disk has less free space than the size of the last checkpoint."""
    return shutil.disk_usage(run).free < _size(complete(run)[-1:])


def disk_space(run: Path, last: int, keep: int | None, first_bytes: int, writing: int | None = None) -> tuple[int, int]:
    """Return (needed, available) bytes for the next checkpoint. `first_bytes`: size of the first checkpoint.

    `writing`: step of a checkpoint that is being written, which counts as complete; other incomplete ones are removed.
    """
    newest, partial = complete(run)[-1:], run / f"global_step_{writing}.partial"
    needed = _size(newest) if newest else first_bytes
    left = 0 if writing is None else max(0, needed - _size([partial]))
    removed = [each for each in run.glob("global_step_*.partial") if each != partial]
    removed += _outdated(run, last, keep, writing is not None)
    return needed, shutil.disk_usage(run).free - left + _size(removed)


def _outdated(run: Path, last: int, keep: int | None, more: int = 0) -> list[Path]:
    """Return the checkpoints up to step `last`, oldest first, that the next one replaces; never the newest.

    `more`: number of newer ones that are not published yet.
    """
    whole = [path for path in complete(run) if _step(path) <= last]
    return whole[: max(0, len(whole) + more - max(keep - 1, 1))] if keep else []


def _size(folders: list[Path]) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def _not_saved(run: Path, step: int, error: Exception | None) -> NotSaved:
    last, written = complete(run)[-1:], _size([run / f"global_step_{step}.partial"])
    why = "" if error is None else f" ({_cause(error)})"
    kept = f"The last checkpoint is {last[0]}" if last else "There is no earlier checkpoint"
    free = shutil.disk_usage(run).free
    if error is not None and not _is_full(error, free):
        return NotSaved(
            f"The checkpoint of step {step} could not be written{why}. {kept}. Fix the cause and rerun the command."
        )
    needed = f"{_size(last) / MIB:.1f} MiB (like {last[0].name})" if last else f"more than {written / MIB:.1f} MiB"
    return NotSaved(
        f"The checkpoint of step {step} could not be written{why}: {needed} needed, "
        f"{(free + written) / MIB:.1f} MiB free in {run}. {kept}. Free disk space, or lower trainer.max_ckpt_to_keep."
    )


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, NotSaved | OSError) else f"{type(error).__name__}: {text}"


def _is_full(error: Exception, free: int) -> bool:
    """Return whether the disk was full; torch's error does not name the cause."""
    named = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    return named or free < MIB


def complete(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first."""
    found = [path for path in run.glob("global_step_*") if (path / MARKER).exists() and path.suffix != ".partial"]
    return sorted(found, key=_step)


def later(run: Path, step: int) -> list[Path]:
    """Return the complete checkpoints of later steps, which a run resumed from this step abandons."""
    return [path for path in complete(run) if _step(path) > step]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("_", 1)[1])


def write_times(run: Path) -> dict[Path, int]:
    """Return the write time of each complete checkpoint, oldest first; a rewritten checkpoint has a new one."""
    return {path: (path / MARKER).stat().st_mtime_ns for path in complete(run)}


def find(run: Path, resume_mode: str) -> Path | None:
    """Return the checkpoint to resume from, by trainer.resume_mode; None to start from scratch."""
    if resume_mode == "auto":
        return (complete(run) or [None])[-1]
    if resume_mode == "disable":
        return None
    folder = Path(resume_mode)
    if not (folder / MARKER).exists():
        others = ", ".join(path.name for path in complete(folder.parent)) or "none"
        raise ConfigError(
            [
                f"trainer.resume_mode={resume_mode} is not a complete checkpoint (no {MARKER} file in it). Give auto, "
                f"disable or a global_step_N folder; complete ones in {folder.parent}: {others}."
            ]
        )
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Return the `state` passed to `write`, including the step."""
    return parse_json((folder / "run.json").read_text())
