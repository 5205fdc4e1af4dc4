"""Proposer of drafts from an earlier response with the same seed, which requests carry (`Request.draft`).

The draft continues at the same position of the response while the latest tokens agree with it. After a difference, as
many tokens are drafted as have agreed since, so that drafts grow quickly where both run in parallel again. Invariant:
proposing depends on the request's tokens only, so a sample continues on another engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rlfuse.engines.vllm.proposer import Proposer
from rlfuse.engines.vllm.worker_extension import drawn

DRAFT = "rlfuse_draft"
"""Key of `SamplingParams.extra_args`: the earlier response, as bytes of int32."""


def continuation(draft: np.ndarray, length: int, recent: Sequence[int], limit: int) -> np.ndarray:
    """Return up to `limit` tokens of `draft` that may follow a response of `length` tokens.

    `recent`: the last tokens of the response, `limit` of them or all.
    """
    start = length - len(recent)
    known = draft[start:length]
    differs = np.flatnonzero(known != recent[: len(known)])
    if len(known) < len(recent) or (len(differs) and differs[-1] == len(known) - 1):
        return draft[:0]
    agreed = len(known) - 1 - differs[-1] if len(differs) else limit
    return draft[length : length + agreed]


class HistoryProposer(Proposer):
    """Proposer in the V1 model runner."""

    def propose(self, request: CachedRequestState, limit: int) -> list[int]:
        content = (request.sampling_params.extra_args or {}).get(DRAFT)
        if content is None:
            return []
        given, output = drawn(request), request.output_token_ids
        recent = output[-limit:]
        if given and len(recent) < limit:
            recent = [*request.prompt_token_ids[-given:], *recent][-limit:]
        return continuation(np.frombuffer(content, np.int32), given + len(output), recent, limit).tolist()
