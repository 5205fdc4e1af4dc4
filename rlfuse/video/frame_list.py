"""Clips given as lists of frame images, stored as a small file with the frames' paths and rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlfuse.parsing import parse_json

SUFFIX = ".frames"


class FrameList(NamedTuple):
    """Absolute paths of frame images, and their rate."""

    frames: tuple[str, ...]
    fps: float


def frame_list_bytes(frames: Sequence[str], fps: float) -> bytes:
    """Return the contents of a frame list file."""
    return json.dumps({"frames": list(frames), "fps": fps}).encode()


def read_frame_list(path: str | Path) -> FrameList | None:
    """Read a frame list file; return None for any other file."""
    if Path(path).suffix != SUFFIX:
        return None
    held = parse_json(Path(path).read_bytes())
    return FrameList(tuple(held["frames"]), held["fps"])
