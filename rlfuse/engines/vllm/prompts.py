"""Build vLLM's prompts: token ids and, for clips, rows of the embedding cache.

Text is passed as token ids, so vLLM embeds it with its current weights. With `prompt_embeds`, text rows are NaN, so
that vLLM's prefix cache can distinguish them from embeddings; with `video_embeds`, it hashes the clip's key. The active
samples of a prompt share one tensor. No request can draw a placeholder (`rlfuse.video.placeholders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import PreTrainedConfig

from rlfuse.errors import EngineError
from rlfuse.samples import Visual
from rlfuse.video.models.base import Route, embedding_width, family_of
from rlfuse.video.placeholders import placeholder_ids
from rlfuse.video.vllm_route import Refusal, select_route


def prompt_arguments(config: PreTrainedConfig, max_model_len: int) -> dict[str, Any]:
    """Return vLLM's engine arguments for clips; empty for a text model."""
    route = select_route(config)
    if route is Route.PROMPT_EMBEDS:
        return {"enable_prompt_embeds": True}
    if route is Route.VIDEO_EMBEDS:
        return {
            "enable_mm_embeds": True,
            "limit_mm_per_prompt": {"image": 0},
            "max_num_batched_tokens": max(max_model_len, 2048),  # vLLM processes a clip's whole embedding in one step
        }
    return {}


class Prompts:
    """Builder of the prompts of one engine, whose steps have at most `batched_tokens` tokens."""

    def __init__(self, config: PreTrainedConfig, batched_tokens: int):
        self._config, self._batched_tokens = config, batched_tokens
        self._hidden = embedding_width(config)
        self._placeholders = placeholder_ids(config)
        self._shared: WeakValueDictionary[tuple[str | bytes, ...], torch.Tensor] = WeakValueDictionary()
        self.logit_bias = {token: -np.inf for token in self._placeholders} or None
        """Added to the logits of every request."""

    def check(self, sample_id: str, prompt_ids: np.ndarray, visual: Sequence[Visual]) -> None:
        """Raise ValueError unless prompt, video plans, embeddings, model and engine match."""
        if not self._placeholders and not visual:
            return
        placeholders_at = np.flatnonzero(np.isin(prompt_ids, self._placeholders))
        places = np.concatenate([each.positions for each in visual]) if visual else np.empty(0, int)
        for each in visual:
            self._check(f"sample {sample_id}: {each.path}", each)
        if not np.array_equal(placeholders_at, places):
            raise ValueError(
                f"sample {sample_id} has {len(placeholders_at)} visual placeholders in its prompt, but its clips have "
                f"{len(places)} positions; create all of them from the same video plans"
            )

    def _check(self, clip: str, visual: Visual) -> None:
        if isinstance(route := select_route(self._config, visual.plan), Refusal):
            raise ValueError(f"{clip} can't be passed to vLLM: {route.reason}")
        if (embedding := visual.source) is None:
            raise ValueError(f"{clip} has no embedding; encode it before the rollout")
        tokens = embedding.tokens
        if not len(visual.positions) == tokens == visual.plan.tokens:
            raise ValueError(
                f"{clip} has an embedding of {tokens} tokens, a plan of {visual.plan.tokens} and "
                f"{len(visual.positions)} positions; create all of them from the same video plan"
            )
        if embedding.hidden != self._hidden:
            raise ValueError(
                f"{clip} has an embedding of width {embedding.hidden}, but the model's is {self._hidden}; encode it "
                "with the vision tower of this model"
            )
        if route is Route.VIDEO_EMBEDS and tokens > self._batched_tokens:
            raise ValueError(
                f"{clip} has {tokens} visual tokens, but the engine's steps have at most {self._batched_tokens}; raise "
                "max_num_batched_tokens in its engine_kwargs, or lower the plan's budget"
            )

    def prompt(self, ids: np.ndarray, visual: Sequence[Visual]) -> dict[str, Any]:
        """Return vLLM's prompt for `ids` (prompt and generated tokens), with the clips at their positions."""
        if not visual:
            return {"type": "token", "prompt_token_ids": ids.tolist()}  # the format of vLLM's renderer
        if select_route(self._config) is Route.PROMPT_EMBEDS:
            text = np.ones(len(ids), bool)
            text[np.concatenate([each.positions for each in visual])] = False
            rows = self._rows(ids, visual)
            return {"prompt_embeds": rows, "prompt_token_ids": ids.tolist(), "prompt_is_token_ids": text.tolist()}
        family, once, kept = family_of(self._config), ids.copy(), np.ones(len(ids), bool)
        for each in visual:
            first, end = family.engine_written_span(self._config, ids, each)
            once[first], kept[first + 1 : end] = ids[each.positions[0]], False
        uuids, data = {}, {}
        for modality, alike in groupby(sorted(visual, key=_modality), key=_modality):
            shown = list(alike)
            embeddings = [_read(each) for each in shown]
            inputs = [family.grid_inputs(self._config, each.plan) for each in shown]
            data[modality] = {name: _batched([each[name] for each in inputs]) for name in inputs[0]}
            data[modality][f"{modality}_embeds"] = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings)
            uuids[modality] = [each.source.key for each in shown]
        return {"prompt_token_ids": once[kept].tolist(), "multi_modal_data": data, "multi_modal_uuids": uuids}

    def _rows(self, ids: np.ndarray, visual: Sequence[Visual]) -> torch.Tensor:
        """Return embeddings at their positions and NaN for text, bf16 [len(ids), hidden]."""
        key = (*(each.source.key for each in visual), ids.tobytes())
        rows = self._shared.get(key)
        if rows is None:
            rows = torch.full((len(ids), self._hidden), torch.nan, dtype=torch.bfloat16)
            for each in visual:
                rows[torch.from_numpy(each.positions).long()] = _read(each)
            self._shared[key] = rows
        return rows


def _modality(visual: Visual) -> str:
    return visual.plan.modality


def _batched(inputs: Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return one row per clip; a list if rows differ in length, like the frame times of clips of several lengths."""
    rows = [row for each in inputs for row in each]
    return torch.stack(rows) if len({row.shape for row in rows}) == 1 else rows


def _read(visual: Visual) -> torch.Tensor:
    """Map the clip's embedding into memory. Raises EngineError if it is missing or not finite."""
    rows = visual.source.read()
    if not torch.stack(rows.aminmax()).isfinite().all():
        raise EngineError(
            f"the embedding of {visual.path} ({visual.source.key}) contains NaN or infinity; check the vision tower"
        )
    return rows
