"""Proposer of drafts from an earlier response with the same seed, which requests carry (`Request.draft`).

The draft continues at the same position of the response while the latest tokens agree with it, and after a difference
where most of them do, because tokens may have been inserted or left out. Little agreement gives a short draft.
Invariant: drafts depend on the tokens of the request only, so a sample continues on another engine.
"""

from __future__ import annotations

import numpy as np
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rlfuse.engines.vllm.proposer import Proposer
from rlfuse.engines.vllm.request_arguments import draft_of, drawn_tokens

CONTEXT = 8
"""Number of latest tokens that are compared with the draft."""
DRAFTED_PER_AGREED = 4
"""Draft tokens after a difference, per latest token that agrees and one more."""


def continuation(draft: np.ndarray, length: int, recent: np.ndarray, limit: int) -> np.ndarray:
    """Return up to `limit` tokens of `draft` that may follow a response of `length` tokens.

    `recent`: the last tokens of the response, `CONTEXT` of them or all.
    """
    if np.array_equal(draft[length - len(recent) : length], recent):
        return draft[length : length + limit]
    agreed, running = np.zeros(len(draft), np.int64), np.ones(len(draft), bool)
    for back, token in enumerate(recent[::-1], 1):
        running[:back] = False
        running[back:] &= draft[:-back] == token
        agreed += running
    most, places = agreed.max(initial=0), np.arange(len(draft))
    distances = 2 * np.abs(places - length) + (places > length)
    start = int(np.where(agreed == most, distances, 2 * (length + len(draft))).argmin()) if most else length
    return draft[start : start + min(limit, DRAFTED_PER_AGREED * (most + 1))]


class HistoryProposer(Proposer):
    """Proposer in the V1 model runner (CPU hosts)."""

    def propose(self, request: CachedRequestState, limit: int) -> list[int]:
        draft = draft_of(request.sampling_params)
        if not len(draft):
            return []
        output, drawn = request.output_token_ids, drawn_tokens(request.sampling_params)
        recent = output[-CONTEXT:]
        if drawn and len(recent) < CONTEXT:
            recent = [*request.prompt_token_ids[-drawn:], *recent][-CONTEXT:]
        return continuation(draft, drawn + len(output), np.array(recent, draft.dtype), limit).tolist()
