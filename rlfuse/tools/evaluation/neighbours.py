"""Drafts of an evaluation: the responses of the nearest checkpoint that was evaluated, or validated by its run.

Role: engines verify these drafts, so an unsuitable file costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
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
    """Set the draft of each sample from the file of the nearest step that has its response; return the nearest file.

    Of files with equally near steps, the newest comes first. None: no file has a response to one of these prompts with
    its seed. Files that can't be read, for example removed ones, are left out.
    """
    keys = [sample.draft_key for group in groups for sample in group.samples]
    found: list[tuple[int, float, Path]] = []
    for path in paths:
        with suppress(OSError), closing(StoredResponses(path)) as stored:
            if steps := [known for key in keys if (known := stored.step_of(key)) is not None]:
                found.append((abs(max(steps) - step), -path.stat().st_mtime, path))
    nearest = None
    for *_, path in sorted(found, reverse=True):
        with suppress(OSError), closing(StoredResponses(path)) as stored:
            attach(stored, groups)
            nearest = path
    return nearest
