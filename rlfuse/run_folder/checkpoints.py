"""Layout of checkpoints on disk, and which of them are complete.

    global_step_N/{actor,critic}/   weights and optimizer; actor/huggingface loads with from_pretrained and vLLM
    global_step_N/run.json          step, position in the data, KL coefficient, number of optimizer steps
    global_step_N/COMPLETE          written last
    latest_checkpointed_iteration.txt

A checkpoint is written as `global_step_N.partial` and renamed when it is complete and the step's rows are on disk, each
stage flushed before the next. So a run killed at any moment resumes from the last folder with its marker.
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
    """Write a checkpoint by `fill`; it counts once `publish`ed. Old ones beyond `keep` up to step `last` are removed
    first if room lacks. NotSaved with the cause."""
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


async def write_trial(run: Path, state: dict[str, Any], describe: Fill) -> None:
    """Write all that a checkpoint has except weights (`describe`) and remove it. NotSaved with what failed, and why."""
    partial = _new_partial(run, 0)
    try:
        await _fill(partial, state, describe)
    except Exception as error:
        if isinstance(error, RlfuseError) and not isinstance(error, NotSaved):
            raise
        raise NotSaved(
            f"Checkpoints can't be written in {run}: {_cause(error)}. All files of a checkpoint except the weights are "
            "written once at startup, to find this early. Fix the cause and rerun the command."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _new_partial(run: Path, step: int) -> Path:
    for left_over in run.glob("global_step_*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    return run / f"global_step_{step}.partial"


async def _fill(partial: Path, state: dict[str, Any], fill: Fill) -> None:
    partial.mkdir(parents=True)
    await fill(partial)
    (partial / "run.json").write_text(json.dumps(state))
    await asyncio.to_thread(sync_all, partial)  # gigabytes, and workers have to be watched meanwhile


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is once it counts."""
    return run / f"global_step_{step}"


def publish(run: Path, step: int, keep: int | None) -> None:
    """From now on runs resume from what `write` wrote; later ones, and older ones beyond `keep`, go."""
    final = folder_of(run, step)
    for abandoned in later(run, step):  # first, or they are the newest for `auto` after a kill
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
    """Whether the disk has less free space than the last checkpoint takes."""
    return shutil.disk_usage(run).free < _size(complete(run)[-1:])


def room(run: Path, last: int, keep: int | None, first_bytes: int) -> tuple[int, int]:
    """Return the bytes that the next checkpoint needs and can use. `first_bytes`: need of a first one."""
    newest = complete(run)[-1:]
    needed = _size(newest) if newest else first_bytes
    return needed, shutil.disk_usage(run).free + _size(_outdated(run, last, keep))


def _outdated(run: Path, last: int, keep: int | None) -> list[Path]:
    """Return those up to step `last`, oldest first, that go once the next one counts; never `last`."""
    whole = [path for path in complete(run) if _step(path) <= last]
    return whole[: max(0, len(whole) - max(keep - 1, 1))] if keep else []


def _size(folders: list[Path]) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def _not_saved(run: Path, step: int, error: Exception | None) -> NotSaved:
    last, written = complete(run)[-1:], _size([run / f"global_step_{step}.partial"])
    why = "" if error is None else f" ({_cause(error)})"
    kept = f"{last[0]} is still there" if last else "There is no earlier one"
    free = shutil.disk_usage(run).free
    if error is not None and not _is_full(error, free):
        return NotSaved(
            f"The checkpoint of step {step} could not be written{why}. {kept}. Fix the cause and save again."
        )
    needed = f"{_size(last) / MIB:.1f} MiB, as {last[0].name} has," if last else f"more than {written / MIB:.1f} MiB"
    return NotSaved(
        f"The checkpoint of step {step} could not be written{why}: {run} needs {needed} and has "
        f"{(free + written) / MIB:.1f} MiB free. {kept}. Make room there, or lower trainer.max_ckpt_to_keep."
    )


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, NotSaved | OSError) else f"{type(error).__name__}: {text}"


def _is_full(error: Exception, free: int) -> bool:
    """Return whether the disk was full; torch has an error of its own that names no cause."""
    named = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    return named or free < MIB


def complete(run: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = [path for path in run.glob("global_step_*") if (path / MARKER).exists() and path.suffix != ".partial"]
    return sorted(found, key=_step)


def later(run: Path, step: int) -> list[Path]:
    """Complete checkpoints of steps after this one: a run that goes on from there abandons them."""
    return [path for path in complete(run) if _step(path) > step]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("_", 1)[1])


def written(run: Path) -> dict[Path, int]:
    """Complete checkpoints, oldest first -> the date of each, by which one that was written again differs."""
    return {path: (path / MARKER).stat().st_mtime_ns for path in complete(run)}


def find(run: Path, resume_mode: str) -> Path | None:
    """The checkpoint to start from under trainer.resume_mode, or None for a fresh start."""
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
    """What `write` was given as state, and the step."""
    return parse_json((folder / "run.json").read_text())
