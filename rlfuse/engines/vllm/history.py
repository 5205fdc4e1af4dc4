"""Proposer of drafts from earlier responses, which requests carry (`Sample.drafts`).

Drafts continue at the same position of the response with the same seed while the latest tokens agree with it. After a
difference they continue where most of the latest tokens agree, in that response or another to the same prompt, because
tokens may have been inserted or left out; drafts then have one token more than agree, because verification has a cost.
Invariant: drafts depend on the tokens of the request only, so a sample continues on another engine.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rlfuse.engines.vllm.proposer import Proposer
from rlfuse.engines.vllm.request_arguments import SEPARATOR, draft_of, drawn_tokens

CONTEXT = 16
"""Number of latest tokens that are compared with the draft."""


def continuation(draft: np.ndarray, length: int, recent: np.ndarray, limit: int) -> np.ndarray:
    """Return up to `limit` tokens of `draft` that may follow a response of `length` tokens.

    `recent`: the last tokens of the response, `CONTEXT` of them or all.
    """
    start = length
    if not np.array_equal(draft[length - len(recent) : length], recent):
        padded = np.concatenate([np.full(len(recent), SEPARATOR, draft.dtype), draft])
        before = sliding_window_view(padded, len(recent))[: len(draft)]
        agreed = (before == recent)[:, ::-1].cumprod(1).sum(1) * (draft != SEPARATOR)
        places, most = np.arange(len(draft)), int(agreed.max(initial=0))
        distances = 2 * np.abs(places - length) + (places > length)
        start = int((4 * (length + len(draft)) * agreed - distances).argmax()) if most else length
        limit = min(limit, most + 1)
    following = draft[start : start + limit]
    ends = np.flatnonzero(following == SEPARATOR)
    return following[: ends[0]] if len(ends) else following


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
