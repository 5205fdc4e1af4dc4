"""Output folders of the tasks of `rlfuse prepare`."""

from __future__ import annotations

from pathlib import Path

FOLDERS = {
    "quickstart": Path(".cache/rlfuse/remainder"),
    "demonstrations": Path(".cache/rlfuse/demonstrations"),
    "preferences": Path(".cache/rlfuse/preferences"),
    "pairs": Path("data/pairs"),
    "judge": Path(".cache/rlfuse/judge"),
    "long_video": Path(".cache/rlfuse/clips"),
    "images": Path(".cache/rlfuse/images"),
    "gsm8k": Path("data/gsm8k"),
}


def command_for(path: str | None) -> str | None:
    """Return the command that creates `path`; None if it is not in the folder of a bundled task."""
    if path is None:
        return None
    return next(
        (f"rlfuse prepare {task}" for task, folder in FOLDERS.items() if Path(path).is_relative_to(folder)), None
    )
