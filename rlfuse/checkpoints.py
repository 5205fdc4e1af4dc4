"""Where a run's state lies on disk, and which of it is whole.

Role: called by the journal to write and by the run to resume. Layout, in the run folder:

    global_step_N/{actor,critic}/   weights and optimizer; actor/huggingface loads with from_pretrained and vLLM
    global_step_N/run.json          step, position in the data, KL coefficient
    global_step_N/COMPLETE          written last
    latest_checkpointed_iteration.txt

Invariants: a checkpoint grows in `global_step_N.partial` and is renamed when it is whole, so a run killed at any moment
resumes from the last folder that has its marker.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlfuse.config.checks import ConfigError

MARKER = "COMPLETE"
LATEST = "latest_checkpointed_iteration.txt"


async def write(
    run: Path, step: int, state: dict[str, Any], fill: Callable[[Path], Awaitable[None]], keep: int | None
) -> Path:
    """Write one checkpoint, whole or not at all: `fill` writes the models; then older ones beyond `keep` go."""
    final, partial = run / f"global_step_{step}", run / f"global_step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    await fill(partial)
    (partial / "run.json").write_text(json.dumps({"step": step, **state}))
    (partial / MARKER).touch()
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    (run / LATEST).write_text(str(step))
    for old in complete(run)[:-keep] if keep else []:
        shutil.rmtree(old)
    return final


def complete(run: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = [path for path in run.glob("global_step_*") if (path / MARKER).exists() and path.suffix != ".partial"]
    return sorted(found, key=lambda path: int(path.name.rsplit("_", 1)[1]))


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
