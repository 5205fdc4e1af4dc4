"""Map safetensors files into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import _TYPES


def map_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a file written by `safetensors.torch.save_file`.

    Not `safetensors.safe_open`, which leaks 64 bytes per tensor of every push (versions 0.6 to 0.8).
    """
    data = torch.from_file(str(path), size=os.path.getsize(path), dtype=torch.uint8)
    start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    header = json.loads(data[8:start].numpy().tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield name, data[start + first : start + end].view(_TYPES[entry["dtype"]]).view(entry["shape"])


def safetensors_files(folder: Path) -> list[Path]:
    """Return the *.safetensors files of a model's folder. FileNotFoundError if there are none."""
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise FileNotFoundError(f"no *.safetensors in {folder}: convert the checkpoint with save_pretrained")
