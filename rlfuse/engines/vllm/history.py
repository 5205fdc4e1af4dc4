"""Proposer of drafts from an earlier response with the same seed, which requests carry (`Request.draft`).

The draft continues at the same position of the response: in full while the latest tokens agree with it, and after a
difference with one token more than have agreed since, so that drafts grow quickly where both are equal again.
Invariant: drafts depend on the tokens of the request only, so a sample continues on another engine.
"""

from __future__ import annotations

import numpy as np
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rlfuse.engines.vllm.proposer import Proposer
from rlfuse.engines.vllm.request_arguments import draft_of, drawn_tokens


def continuation(draft: np.ndarray, length: int, recent: np.ndarray, limit: int) -> np.ndarray:
    """Return up to `limit` tokens of `draft` that may follow a response of `length` tokens.

    `recent`: the last tokens of the response, `limit` of them or all.
    """
    known = draft[length - len(recent) : length]
    differs = np.flatnonzero(known != recent[: len(known)])
    agreed = len(known) - 1 - differs[-1] if len(differs) else limit
    return draft[length : length + min(agreed + 1, limit)]


class HistoryProposer(Proposer):
    """Proposer in the V1 model runner (CPU hosts)."""

    def propose(self, request: CachedRequestState, limit: int) -> list[int]:
        draft = draft_of(request.sampling_params)
        if not len(draft):
            return []
        output, drawn = request.output_token_ids, drawn_tokens(request.sampling_params)
        recent = output[-limit:]
        if drawn and len(recent) < limit:
            recent = [*request.prompt_token_ids[-drawn:], *recent][-limit:]
        return continuation(draft, drawn + len(output), np.array(recent), limit).tolist()
