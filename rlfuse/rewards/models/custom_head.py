"""Pooling and head of a reward model in the user's class: `reward.model_head`.

Role: the base model of `reward.model_path` gives hidden states, the class turns them into one score per label. The
head's weights are read from the same safetensors files, under the names of its parameters.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from rlfuse.config.custom_errors import function_error
from rlfuse.config.custom_functions import HEAD, split_reference
from rlfuse.config.custom_modules import load
from rlfuse.errors import RewardError
from rlfuse.tensor_files import map_tensors


class CustomHead(torch.nn.Module):
    """Base model with a custom head. Called like a sequence classifier of transformers.

    `head`: the class, as `path/file.py:name`, constructed as `Head(config, **kwargs)`. It is called with
    `hidden_states` [B, T, H] of the last layer and `attention_mask` [B, T], both in the model's dtype, and returns
    logits [B, labels].
    """

    def __init__(self, base: torch.nn.Module, config: Any, head: str, kwargs: dict[str, Any], path: str):
        super().__init__()
        self.base, self._labels, self._name = base, len(config.id2label), f"{HEAD}={head}"
        made = load(HEAD, head)
        try:
            self.head = made(config, **kwargs)
        except (Exception, SystemExit) as error:
            raise function_error(self._name, error, made) from error
        if not isinstance(self.head, torch.nn.Module):
            raise RewardError(f"{self._name}: must be a torch.nn.Module, got {type(self.head).__name__}")
        # A hub name: the base model was downloaded from there.
        folder = path if Path(path).is_dir() else snapshot_download(path, allow_patterns="*.safetensors")
        self._load_weights(Path(folder), split_reference(head)[1])

    def _load_weights(self, folder: Path, name: str) -> None:
        wanted = self.head.state_dict()
        saved = dict(pair for file in sorted(folder.glob("*.safetensors")) for pair in map_tensors(file))
        problems = [f"{key} is missing" for key in wanted if key not in saved]
        problems += [
            f"{key} has the shape {list(saved[key].shape)} instead of {list(value.shape)}"
            for key, value in wanted.items()
            if key in saved and saved[key].shape != value.shape
        ]
        if problems:
            of_base = tuple(key.split(".")[0] for key in self.base.state_dict())
            others = [key for key in saved if not key.startswith(("model.", *of_base))]
            raise RewardError(
                f"{self._name}: the weights of {name} can't be loaded from {folder}: {', '.join(problems[:4])}. Name "
                f"its parameters as in the files; names outside the base model: {', '.join(others[:8]) or 'none'}"
            )
        self.head.load_state_dict({key: saved[key] for key in wanted})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        hidden = self.base(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        try:
            logits = self.head(hidden, attention_mask.to(hidden.dtype))
        except (Exception, SystemExit) as error:
            raise function_error(self._name, error, type(self.head).forward) from error
        if not isinstance(logits, Tensor) or logits.shape != (len(hidden), self._labels):
            found = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise RewardError(f"{self._name}: returned {found}; return logits {[len(hidden), self._labels]}")
        return SimpleNamespace(logits=logits)
