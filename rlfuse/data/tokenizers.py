"""The tokenizer of a run, from the model's folder or hub name.

Role: called once by the run, before Ray starts; a wrong path ends there with the remedy.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlfuse.config.checks import ConfigError
from rlfuse.config.schema import ModelConfig


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model's weights."""
    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(model.path).is_dir() else "hub name"
        raise ConfigError(
            [
                f"model.path={model.path}: the {kind} has no tokenizer that transformers can load "
                f"({str(error).strip().splitlines()[0]}). Save one into it with tokenizer.save_pretrained(path)."
            ]
        ) from error
