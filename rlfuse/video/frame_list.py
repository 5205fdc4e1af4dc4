"""Clips that are lists of frame images: a small file names frames and rate and serves as the clip's path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlfuse.parsing import parse_json

SUFFIX = ".frames"


class FrameList(NamedTuple):
    """Absolute paths of images, shown `fps` a second."""

    frames: tuple[str, ...]
    fps: float


def frame_list_bytes(frames: Sequence[str], fps: float) -> bytes:
    """What the file holds."""
    return json.dumps({"frames": list(frames), "fps": fps}).encode()


def frame_list(path: str | Path) -> FrameList | None:
    """Read the list in this file; None for any other file."""
    if Path(path).suffix != SUFFIX:
        return None
    held = parse_json(Path(path).read_bytes())
    return FrameList(tuple(held["frames"]), held["fps"])
