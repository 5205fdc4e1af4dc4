"""Copy the files of a model folder other than weights, and keep the keys of its config.json."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

NOT_KEPT = ("auto_map", "quantization_config", "_name_or_path", "transformers_version")
"""Keys of the source that do not apply to the saved model, unless transformers saves them."""
NOISE = ("drop", "jitter")


def is_noise(name: str, value: Any) -> bool:
    """Return whether a field is a probability or width of noise, such as dropout."""
    return isinstance(value, float) and any(word in name for word in NOISE)


def with_keys_of(source: Mapping[str, Any], saved: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` with all keys of `source`. `whole`: `saved` with defaults.

    transformers 5 saves rope_theta, rope_scaling and torch_dtype under new names, which transformers 4 does not read,
    and omits defaults. Dropout is disabled in training only, so the source's values are saved.
    """
    found = {key: value for key, value in saved.items() if key in source or not is_noise(key, value)}
    for key, value in source.items():
        if key in NOT_KEPT:
            continue
        if isinstance(value, dict) and isinstance(saved.get(key), dict):
            found[key] = with_keys_of(value, saved[key], whole[key])
        elif key == "torch_dtype":
            found[key] = whole.get("dtype") or value
        elif is_noise(key, value) or key not in whole:
            found[key] = value
        else:
            found[key] = whole[key]
    return found


WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def folder_of(source: str) -> Path | None:
    """Return the folder of a loaded model: `source`, or the cache folder of a hub name; None if there is neither."""
    if source and Path(source).is_dir():
        return Path(source)
    with suppress(HFValidationError):  # not a hub name
        if isinstance(config := try_to_load_from_cache(source, "config.json"), str):
            return Path(config).parent
    return None


def copy_files(source: str, out: Path, pattern: str = "*") -> list[str]:
    """Copy matching files and return their names, except config.json, weights, index and model card."""
    folder, copied = folder_of(source), []
    for file in sorted(folder.glob(pattern)) if folder else ():
        other = file.suffix in WEIGHTS or file.name.endswith(".index.json") or file.name in ("config.json", "README.md")
        if file.is_file() and not other:
            shutil.copyfile(file, out / file.name)
            copied.append(file.name)
    return copied
