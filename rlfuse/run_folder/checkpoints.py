"""Where a run's state lies on disk, and which of it is whole.

Role: called by `run.checkpointing` to write and by the run to resume. Layout, in the run folder:

    global_step_N/{actor,critic}/   weights and optimizer; actor/huggingface loads with from_pretrained and vLLM
    global_step_N/run.json          step, position in the data, KL coefficient, number of optimizer steps
    global_step_N/COMPLETE          written last
    latest_checkpointed_iteration.txt

Invariants: a checkpoint grows in `global_step_N.partial` and is renamed when it is whole and the step's rows are on
disk, so a run killed at any moment resumes from the last folder that has its marker, without a gap; older ones go after
that. Later ones, of a run that was told to go back to one before them, go just before it. Each of these is on the disk
(`files`) before the next is done, so the same holds where power is lost.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlfuse.errors import ConfigError, NotSaved
from rlfuse.files import sync, sync_all, write_whole

MARKER = "COMPLETE"
LATEST = "latest_checkpointed_iteration.txt"
MIB = 1 << 20


async def write(run: Path, step: int, state: dict[str, Any], fill: Callable[[Path], Awaitable[None]]) -> None:
    """Write one checkpoint, whole or not at all: `fill` writes the models. It counts once it is `publish`ed.

    NotSaved, with what it needs and what there is, where a file could not be written or there clearly is no room.
    """
    partial = run / f"global_step_{step}.partial"
    for left_over in run.glob("global_step_*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    if lacks_room(run):
        raise _no_room(run, step, "")
    try:
        partial.mkdir(parents=True)
        await fill(partial)
        (partial / "run.json").write_text(json.dumps({"step": step, **state}))
        await asyncio.to_thread(sync_all, partial)  # gigabytes, and workers have to be watched meanwhile
        (partial / MARKER).touch()
        sync(partial)
    except Exception as error:
        if not isinstance(error, OSError | NotSaved) and "No space left" not in str(error):  # tokenizers have their own
            raise
        raise _no_room(run, step, f" ({error})") from error
    finally:
        if not (partial / MARKER).exists():
            shutil.rmtree(partial, ignore_errors=True)


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
    write_whole(run / LATEST, str(step))


def _remove(checkpoint: Path) -> None:
    """The marker first: whoever is killed in between leaves nothing that looks whole."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def lacks_room(run: Path, first_bytes: int = 0) -> str:
    """What the next checkpoint needs and the disk has, where that is less; `first_bytes`: of a run's first one."""
    last, free = complete(run)[-1:], shutil.disk_usage(run).free
    needed = _size(last) if last else first_bytes
    return f"{needed / MIB:,.1f} MiB needed, {free / MIB:,.1f} MiB free in {run}" if free < needed else ""


def _size(folders: list[Path]) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def _no_room(run: Path, step: int, reason: str) -> NotSaved:
    """While what was written of it is still there."""
    last, written = complete(run)[-1:], _size([run / f"global_step_{step}.partial"])
    free = shutil.disk_usage(run).free + written
    needed = f"{_size(last) / MIB:.1f} MiB, as {last[0].name} has," if last else f"more than {written / MIB:.1f} MiB"
    kept = f"{last[0]} is still there" if last else "there is none before it"
    return NotSaved(
        f"The checkpoint of step {step} could not be written{reason}: {run} needs {needed} and has "
        f"{free / MIB:.1f} MiB free. {kept[0].upper()}{kept[1:]}. Make room there, or lower trainer.max_ckpt_to_keep."
    )


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
    return json.loads((folder / "run.json").read_text())
