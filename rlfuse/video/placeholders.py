"""Exclude visual placeholder ids from sampling: engine and trainer both give them -inf, so their log-probs agree."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedConfig, PreTrainedModel

FIELDS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


def placeholder_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the placeholder ids of a model's configuration; () for a text-only model."""
    return tuple(sorted({value for name in FIELDS if isinstance(value := getattr(config, name, None), int)}))


def exclude(model: PreTrainedModel) -> None:
    """Set the model's logits of placeholder ids to -inf, with zero gradient, in all later forward passes."""
    if not isinstance(head := model.get_output_embeddings(), torch.nn.Linear):
        return  # a value model, or a pipeline's stage without this layer
    first = getattr(head, "first_id", 0)  # of a vocabulary shard
    ids = [id - first for id in placeholder_ids(model.config) if first <= id < first + head.out_features]
    if not ids:
        return

    @cache  # copying to the device synchronises
    def columns(device: torch.device) -> torch.Tensor:
        return torch.tensor(ids, device=device)

    def fill(module: torch.nn.Module, inputs: tuple, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, columns(logits.device), -torch.inf)

    head.register_forward_hook(fill)
