"""Samples that are decoded together by a transformers model, their KV cache, and the draw of a token.

Role: `TransformersEngine` calls it in its thread. The batch is left-padded; samples join and leave between two steps.
Invariant: a token is drawn from (seed, position) alone. Waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlfuse.engines.rollout.engine_actor import Request
from rlfuse.protocols import Sampling
from rlfuse.samples import Partial


@dataclass(slots=True, eq=False)
class ActiveSample:
    """A sample that is being generated."""

    request: Request
    sampling: Sampling
    room: int
    """Tokens that may be generated here."""
    done: asyncio.Future
    arrived: float
    tokens: list[int] = field(default_factory=list)
    """Generated here, in addition to the request's."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Distinct versions of the weights that generated here."""
    first_token_s: float | None = None
    reason: str = ""

    @property
    def length(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.request.prompt_ids) + len(self.request.partial.token_ids) + len(self.tokens)

    @property
    def longest(self) -> int:
        return self.length - len(self.tokens) + self.room

    def ids(self) -> np.ndarray:
        return np.concatenate([self.request.ids(), np.asarray(self.tokens, np.int32)])

    def partial(self, version: int) -> Partial:
        """Return what the sample has; `version`: of the current weights."""
        tokens, log_probs = np.asarray(self.tokens, np.int32), np.asarray(self.log_probs, np.float32)
        return self.request.partial.extended(tokens, log_probs, min(self.versions, default=version))


class Batch:
    """Sequences that are decoded together, and their KV cache: left-padded, [rows, heads, columns, size] per layer."""

    def __init__(self, model: Any):
        self._model = model
        self.rows: list[ActiveSample] = []
        self._cache, self._mask = DynamicCache(), torch.empty(0, 0, dtype=torch.long)

    def prefill(self, rows: Sequence[ActiveSample]) -> torch.Tensor:
        """Add rows; return logits [rows, V] of their next tokens."""
        width = max(row.length for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - row.length :] = torch.from_numpy(row.ids().astype(np.int64))
            mask[number, width - row.length :] = 1
        cache = DynamicCache()
        logits = self._forward(ids, mask, cache)
        self._cache, self._mask = self._joined(cache, mask) if self.rows else (cache, mask)
        self.rows += rows
        return logits

    def decode(self) -> torch.Tensor:
        """Return logits [rows, V] after each row's last token."""
        ids = torch.tensor([[row.tokens[-1]] for row in self.rows])
        self._mask = pad(self._mask, (0, 1), value=1)
        return self._forward(ids, self._mask, self._cache)

    def keep(self, rows: Sequence[ActiveSample]) -> None:
        """Drop all other rows, and columns that none uses."""
        if len(rows) == len(self.rows):
            return
        kept = torch.tensor([number for number, row in enumerate(self.rows) if row in rows], dtype=torch.long)
        self.rows = [self.rows[number] for number in kept]
        if not self.rows:
            self.clear()
            return
        self._mask = self._mask[kept]
        first = int(self._mask.any(0).int().argmax())
        self._mask = self._mask[:, first:]
        self._cache = DynamicCache(
            [(key[kept][:, :, first:], value[kept][:, :, first:]) for key, value in _layers(self._cache)]
        )

    def clear(self) -> list[ActiveSample]:
        """Drop everything; return the rows."""
        rows, self.rows = self.rows, []
        self._cache, self._mask = DynamicCache(), torch.empty(0, 0, dtype=torch.long)
        return rows

    def _joined(self, cache: DynamicCache, mask: torch.Tensor) -> tuple[DynamicCache, torch.Tensor]:
        width = max(mask.shape[1], self._mask.shape[1])
        layers = [
            tuple(torch.cat([_widened(each, width) for each in pair]) for pair in zip(old, new, strict=True))
            for old, new in zip(_layers(self._cache), _layers(cache), strict=True)
        ]
        masks = [pad(each, (width - each.shape[1], 0)) for each in (self._mask, mask)]
        return DynamicCache(layers), torch.cat(masks)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            found = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
        return found.logits[:, -1].float()


def _layers(cache: DynamicCache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((layer.keys, layer.values) for layer in cache.layers)


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, heads, columns, size] with empty columns on the left, up to `width`."""
    return pad(tensor, (0, 0, width - tensor.shape[2], 0))


def draw(logits: torch.Tensor, seed: int, position: int, sampling: Sampling) -> tuple[int, float]:
    """Draw a token from logits [V] at a position of the response; return it and its log-prob.

    The token minimises an exponential time with its probability as rate, as in vLLM: rounding changes the winner only
    between near-equals. Times come from Philox (Salmon et al. 2011) with the position as its counter, so a sample may
    continue anywhere. The log-prob is at the sampling temperature, of the truncated distribution.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    log_probs = _warpers(sampling)(None, logits[None])[0].log_softmax(-1)
    times = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, position])).standard_exponential(
        len(logits)
    )
    token = int((log_probs.double() - torch.from_numpy(times).log()).argmax())
    return token, float(log_probs[token])


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    found = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.min_p > 0:  # first, as in vLLM
        found.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found
