"""Labels of a reward model's head, and their selection by `reward_model` or `reward_model:LABEL`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlfuse.config.custom_errors import headline, user_traceback
from rlfuse.config.rewards import MODEL_PART
from rlfuse.errors import RewardError

ONLY_LABEL = "LABEL_0"
AUTO_MAP_CLASS = "AutoModelForSequenceClassification"
"""Entry of auto_map in config.json for a class that ships with the weights."""


def read_config(path: str, key: str, trust_remote_code: bool) -> Any:
    """Return the model's configuration. Raises RewardError if a class that ships with it can't be loaded."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    own = (getattr(config, "auto_map", None) or {}).get(AUTO_MAP_CLASS)
    check_trust(path, key, own, trust_remote_code)
    if own is None:
        return config
    try:
        get_class_from_dynamic_module(own, path)
    except Exception as error:
        raise RewardError(
            f"{key}: {path}: {own} can't be loaded: {headline(error)}\n{user_traceback(error)}"
        ) from error
    return config


def head_labels(path: str, trust_remote_code: bool = False) -> list[str]:
    """Return the labels of the sequence classifier at `path`, in the order of the head; none for other models."""
    config = read_config(path, "model.path", trust_remote_code)
    classes = (*(config.architectures or ()), *(getattr(config, "auto_map", None) or ()))
    return list(config.id2label.values()) if any("SequenceClassification" in name for name in classes) else []


def check_trust(path: str, key: str, own: str | None, trust_remote_code: bool) -> None:
    """Raise RewardError for an untrusted class that ships with a model."""
    if own is not None and not trust_remote_code:
        raise RewardError(
            f"{key}: {path} ships with a custom class, {own}; review its code, then set model.trust_remote_code=true "
            "(in a notebook: trust_remote_code=True) to run it."
        )


def saved_labels(folder: Path) -> tuple[list[str], str | None]:
    """Return (labels, custom class) of the folder's config.json; no labels if they are transformers' defaults."""
    config = json.loads((folder / "config.json").read_text())
    names = config.get("id2label") or {}
    return [names[number] for number in sorted(names, key=int)], (config.get("auto_map") or {}).get(AUTO_MAP_CLASS)


def label_columns(path: str, labels: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the label index of each name, `reward_model` or `reward_model/LABEL`. Raises RewardError for unknown
    ones."""
    found = {}
    for name in names:
        label = name.removeprefix(MODEL_PART).removeprefix("/")
        if not label and len(labels) != 1:
            entries = ", ".join(f"{MODEL_PART}:{each}" for each in labels)
            raise RewardError(
                f"reward.model_path: {path} has {len(labels)} labels. Select those to use as rewards, with "
                f"reward.functions=[{entries}] and reward.weights. (A classifier that was not trained as a reward "
                "model can't be used as one.)"
            )
        if label and label not in labels:
            unnamed = " (transformers' default names of unnamed labels: was it trained with these dimensions?)"
            raise RewardError(
                f"reward.functions: {MODEL_PART}:{label}: {path} has no such label; it has {', '.join(labels)}"
                + (unnamed if ONLY_LABEL in labels else "")
            )
        found[name] = labels.index(label) if label else 0
    return found
