"""Prompts as vLLM takes them: token ids, and for a clip the rows of the embedding cache, put together per request.

Role: used by `RolloutWorker`; only there handles become tensors. Waits for nothing.
Invariants:
- text is always token ids, so vLLM embeds it with the weights of the moment: nothing here knows the embedding matrix;
- what vLLM's prefix cache hashes says all there is to know. With `prompt_embeds` these are ids and rows; text rows are
  NaN, which no embedding is, so rows also say which places are text (and text that vLLM took from here would show).
  With `video_embeds` it is the id of the clip: the cache's key, which names clip, plan and version of the tower;
- siblings share one tensor in this process while one of them is active; in vLLM's own process each has a copy with
  `prompt_embeds` (hidden size 3,584, 81,920 tokens: 560 MiB and about a second each), and all one with `video_embeds`;
- no request can draw a placeholder, see `rlfuse.video.placeholders`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import PreTrainedConfig

from rlfuse.errors import EngineError
from rlfuse.samples import Video
from rlfuse.video.handover import Refusal, hand_over
from rlfuse.video.models.base import Route, family_of
from rlfuse.video.placeholders import placeholder_ids


def prompt_arguments(config: PreTrainedConfig, max_model_len: int) -> dict[str, Any]:
    """vLLM's engine arguments for the model's way of taking clips; none for a model that takes none."""
    route = hand_over(config)
    if route is Route.PROMPT_EMBEDS:
        return {"enable_prompt_embeds": True}
    if route is Route.VIDEO_EMBEDS:
        return {
            "enable_mm_embeds": True,
            "limit_mm_per_prompt": {"image": 0, "video": 1},
            "max_num_batched_tokens": max(max_model_len, 2048),  # vLLM takes a clip's whole embedding in one step
        }
    return {}


class Prompts:
    """Of one engine, whose model has this configuration and which runs at most `batched_tokens` in a step."""

    def __init__(self, config: PreTrainedConfig, batched_tokens: int):
        self._config, self._batched_tokens = config, batched_tokens
        self._hidden = config.get_text_config().hidden_size
        self._placeholders = placeholder_ids(config)
        self._shared: WeakValueDictionary[tuple[str, bytes], torch.Tensor] = WeakValueDictionary()
        self.logit_bias = {token: -np.inf for token in self._placeholders} or None
        """For vLLM's SamplingParams: added to the logits of every request."""

    def check(self, sample_id: str, prompt_ids: np.ndarray, video: Video | None) -> None:
        """ValueError unless prompt, plan, embedding, model and engine fit each other."""
        marked = np.flatnonzero(np.isin(prompt_ids, self._placeholders))
        if video is None:
            if len(marked):
                raise ValueError(f"sample {sample_id} has {len(marked)} visual placeholders in its prompt but no video")
            return
        clip = f"sample {sample_id}: {video.path}"
        if isinstance(route := hand_over(self._config, video.plan), Refusal):
            raise ValueError(f"{clip} can't go to vLLM: {route.reason}")
        if (embedding := video.embedding) is None:
            raise ValueError(f"{clip} has no embedding yet: encode it before its rollout")
        tokens = embedding.tokens
        if not np.array_equal(marked, video.positions) or not len(marked) == tokens == video.plan.tokens:
            raise ValueError(
                f"{clip} has an embedding of {tokens} tokens, a plan of {video.plan.tokens} at {len(video.positions)} "
                f"places, and a prompt with {len(marked)} placeholders: make all of them from one plan"
            )
        if embedding.hidden != self._hidden:
            raise ValueError(
                f"{clip} has an embedding of width {embedding.hidden}, the model's is {self._hidden}: encode it with "
                "the tower of this model"
            )
        if route is Route.VIDEO_EMBEDS and tokens > self._batched_tokens:
            raise ValueError(
                f"{clip} has {tokens} visual tokens, the engine takes at most {self._batched_tokens} in a step: raise "
                "rollout.engine_kwargs.max_num_batched_tokens or lower the plan's budget"
            )

    def prompt(self, ids: np.ndarray, video: Video | None) -> dict[str, Any]:
        """For vLLM: `ids`, the prompt and what was drawn already, with the clip at its places."""
        if video is None:
            return {"prompt_token_ids": ids.tolist()}
        if hand_over(self._config, video.plan) is Route.PROMPT_EMBEDS:
            text = np.ones(len(ids), bool)
            text[video.positions] = False
            rows = self._rows(ids, video)
            return {"prompt_embeds": rows, "prompt_token_ids": ids.tolist(), "prompt_is_token_ids": text.tolist()}
        once = np.delete(ids, video.positions[1:])  # vLLM puts as many as the grid has
        uuids = {"video": [video.embedding.key]}
        data = {"video": self._clip(video)}
        return {"prompt_token_ids": once.tolist(), "multi_modal_data": data, "multi_modal_uuids": uuids}

    def _clip(self, video: Video) -> dict[str, torch.Tensor]:
        """Rows, and what positions are made of."""
        return {"video_embeds": _read(video)} | family_of(self._config).grid_inputs(self._config, video.plan)

    def _rows(self, ids: np.ndarray, video: Video) -> torch.Tensor:
        """bf16 [len(ids), hidden]: the embedding at its places, NaN where vLLM embeds text itself."""
        key = (video.embedding.key, ids.tobytes())
        rows = self._shared.get(key)
        if rows is None:
            rows = torch.full((len(ids), self._hidden), torch.nan, dtype=torch.bfloat16)
            rows[torch.from_numpy(video.positions).long()] = _read(video)
            self._shared[key] = rows
        return rows


def _read(video: Video) -> torch.Tensor:
    """The clip's rows, mapped. EngineError if they are gone, or hold what is no number."""
    rows = video.embedding.read()
    if not torch.stack(rows.aminmax()).isfinite().all():
        raise EngineError(
            f"the embedding of {video.path} ({video.embedding.key}) holds NaN or infinity: its tower failed"
        )
    return rows
