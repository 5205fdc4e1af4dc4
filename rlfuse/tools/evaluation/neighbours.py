"""Drafts of an evaluation: the responses of the nearest checkpoint that was evaluated, or validated by its run.

Role: engines verify these drafts, so an unsuitable file costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

from rlfuse.run_folder.response_store import FILE, StoredResponse, StoredResponses
from rlfuse.samples import Group
from rlfuse.step.drafts import attach
from rlfuse.tools.evaluation.source import Source


def stores(source: Source, folder: Path) -> list[Path]:
    """Return the files of responses next to the evaluation in `folder`, and that of the run of the model."""
    evaluated = (path for path in folder.parent.glob(f"*/{FILE}") if path.parent != folder)
    return [*evaluated, *([source.run / FILE] if source.run and (source.run / FILE).exists() else [])]


class Nearest(NamedTuple):
    """Responses of several files, in order of preference."""

    files: Sequence[StoredResponses]

    def find(self, key: int) -> StoredResponse | None:
        return next((found for file in self.files if (found := file.find(key)) is not None), None)


def attach_nearest(groups: Sequence[Group], step: int, paths: Iterable[Path]) -> Path | None:
    """Set the drafts of these samples, each response from the file of the nearest step that has it; return that file.

    Of files with equally near steps, the newest is preferred. None: no file has a response to one of these prompts with
    its seed. Files that can't be read, for example removed ones, are left out.
    """
    keys = [sample.draft_key for group in groups for sample in group.samples]
    found: list[tuple[int, float, StoredResponses]] = []
    with ExitStack() as stack:
        for path in paths:
            with suppress(OSError):
                stored = stack.enter_context(closing(StoredResponses(path)))
                if steps := [known for key in keys if (known := stored.step_of(key)) is not None]:
                    found.append((abs(max(steps) - step), -path.stat().st_mtime, stored))
        files = [stored for *_, stored in sorted(found, key=lambda each: each[:2])]
        attach(Nearest(files), groups)
    return files[0].path if files else None
