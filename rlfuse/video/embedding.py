"""Keys and files of clip embeddings. The key covers content, plan and tower version.

torch is imported lazily, since cache processes do not need it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlfuse.samples import FramePlan
from rlfuse.video.frame_list import read_frame_list

if TYPE_CHECKING:
    import torch

BF16 = 2
DECODING = 3
"""Version of the decoder; increased when the pixels of a file and a plan change, to invalidate embeddings on disk."""


def embedding_key(content: str, plan: FramePlan, tower_version: str) -> str:
    """Return the key of a clip's embedding; `content`: its `content_hash`."""
    return hashlib.sha256(f"{content} {plan.hash} {tower_version} {DECODING}".encode()).hexdigest()[:40]


def content_hash(path: str | Path) -> str:
    """Hash a file's bytes, or a frame list's rate and frames; cached while size and modification time are unchanged."""
    if listed := read_frame_list(path):
        return hashlib.sha256(" ".join([repr(listed.fps), *map(content_hash, listed.frames)]).encode()).hexdigest()
    status = os.stat(path)
    return _hash(os.path.realpath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _hash(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_rows(path: str, first: int, rows: torch.Tensor) -> None:
    """Write [n, hidden] rows, rounded to bf16, at row `first` of a reserved entry."""
    import torch

    data = rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
    write_bytes(path, first * data.shape[1] * BF16, data)


def write_bytes(path: str, offset: int, data: np.ndarray) -> None:
    """Write all of `data` at `offset` of an existing file."""
    left = memoryview(data).cast("B")
    descriptor = os.open(path, os.O_WRONLY)
    try:
        while left:
            written = os.pwrite(descriptor, left, offset)
            left, offset = left[written:], offset + written
    finally:
        os.close(descriptor)
