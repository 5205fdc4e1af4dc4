"""Keys of a model's config.json that a copy keeps, whichever version of transformers wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_KEPT = ("auto_map", "quantization_config", "_name_or_path", "transformers_version")
"""Keys of a source that are not true of what is saved, unless transformers saves them."""
NOISE = ("drop", "jitter")
"""In the names of probabilities and widths of noise: attn_pdrop, layerdrop, drop_path_rate, router_jitter_noise."""


def is_noise(name: str, value: Any) -> bool:
    """Whether a field is a probability or width of noise."""
    return isinstance(value, float) and any(word in name for word in NOISE)


def with_keys_of(source: Mapping[str, Any], saved: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` with all keys of `source`; `whole`: the same configuration as `saved`, defaults included.

    transformers 5 saves rope_theta, rope_scaling and torch_dtype under new names, which transformers 4 does not read,
    and leaves defaults out. Dropout is off in training only, so the source's values are saved.
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
