"""Drafts of an evaluation: the responses of the nearest checkpoint that was evaluated, or validated by its run.

Role: engines verify these drafts, so an unsuitable file costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from rlfuse.run_folder.response_store import FILE, StoredResponses
from rlfuse.samples import Group
from rlfuse.step.drafts import attach
from rlfuse.tools.evaluation.source import Source


def stores(source: Source, folder: Path) -> list[Path]:
    """Return the files of responses next to the evaluation in `folder`, and that of the run of the model."""
    evaluated = (path for path in folder.parent.glob(f"*/{FILE}") if path.parent != folder)
    return [*evaluated, *([source.run / FILE] if source.run and (source.run / FILE).exists() else [])]


def attach_nearest(groups: Sequence[Group], step: int, paths: Iterable[Path]) -> Path | None:
    """Set the drafts of these samples from the file with responses of the nearest step; return its path.

    Of files with equally near steps, the newest is used. None: no file has a response to one of these prompts with
    its seed.
    """
    keys = [sample.draft_key for group in groups for sample in group.samples]
    found: list[tuple[int, float, Path]] = []
    for path in paths:
        with closing(StoredResponses(path)) as stored:
            if steps := [known for key in keys if (known := stored.step_of(key)) is not None]:
                found.append((abs(max(steps) - step), -path.stat().st_mtime, path))
    if not found:
        return None
    nearest = min(found)[2]
    with closing(StoredResponses(nearest)) as stored:
        attach(stored, groups)
    return nearest
