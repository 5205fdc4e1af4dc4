"""Copy files of a model's folder other than its weights."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def folder_of(source: str) -> Path | None:
    """Return the folder of a model that was loaded: `source`, or where a hub name is cached. None where neither is."""
    if source and Path(source).is_dir():
        return Path(source)
    with suppress(HFValidationError):  # no hub name
        if isinstance(config := try_to_load_from_cache(source, "config.json"), str):
            return Path(config).parent
    return None


def copy_files(source: str, out: Path, pattern: str = "*") -> list[str]:
    """Copy matching files and return their names; never config.json, weights, index or model card."""
    folder, copied = folder_of(source), []
    for file in sorted(folder.glob(pattern)) if folder else ():
        other = file.suffix in WEIGHTS or file.name.endswith(".index.json") or file.name in ("config.json", "README.md")
        if file.is_file() and not other:
            shutil.copyfile(file, out / file.name)
            copied.append(file.name)
    return copied
