"""Proposer of drafts from earlier responses, which requests carry (`Sample.drafts`).

Drafts continue at the same position of the response with the same seed while the latest tokens agree with it. After a
difference they continue where most of the latest tokens agree, in that response, another to the same prompt, or the
request's own, because tokens may have been inserted or left out. `draft_lengths` limits them. Invariant: which tokens
follow depends on the tokens of the request only, so a sample continues on another engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.config import VllmConfig

from rlfuse.engines.vllm.draft_lengths import DraftLengths
from rlfuse.engines.vllm.proposer import Decoding, Proposer
from rlfuse.engines.vllm.request_arguments import SEPARATOR, draft_of

CONTEXT = 16
"""Number of latest tokens that are compared."""
SAME_POSITION = CONTEXT + 1
"""Kind of drafts that continue at the same position; other kinds are the number of agreeing tokens."""
MIN_OWN = 2
"""Minimum number of agreeing tokens in the request's own response."""


def best_place(text: np.ndarray, recent: np.ndarray, length: int) -> tuple[int, int]:
    """Return where most of the latest tokens precede a token of `text`, the place nearest to `length`, and how many."""
    places, agreed = (text[:-1] == recent[-1]).nonzero()[0] + 1, 0
    further = places[text[places] != SEPARATOR]
    while len(further) and agreed < len(recent):
        places, agreed = further, agreed + 1
        if agreed < len(recent):
            further = places[(text[places - agreed - 1] == recent[-agreed - 1]) & (places > agreed)]
    if not agreed:
        return length, 0
    return int(places[(2 * np.abs(places - length) + (places > length)).argmin()]), agreed


def continuation(draft: np.ndarray, response: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
    """Return up to `limit` tokens that may follow the response, and the kind of this draft. All arrays are int32."""
    recent, length = response[-CONTEXT:], len(response)
    text, start, kind = draft, length, SAME_POSITION
    if draft[length - len(recent) : length].tobytes() != recent.tobytes():
        start, kind = best_place(draft, recent, length)
        own_start, own = best_place(response, recent, length)
        if own >= MIN_OWN and own > kind:
            text, start, kind = response, own_start, own
    following = text[start : start + limit]
    ends = (following == SEPARATOR).nonzero()[0]
    return following[: ends[0]] if len(ends) else following, kind


class HistoryProposer(Proposer):
    """Proposer in the V1 model runner (CPU hosts)."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._lengths = DraftLengths(SAME_POSITION + 1, vllm_config.speculative_config.num_speculative_tokens)
        self._drafted: dict[str, tuple[int, int]] = {}
        """Kind and length of each request's last draft."""

    def propose(self, requests: Sequence[Decoding]) -> list[list[int]]:
        for each in requests:
            if each.sampled and each.name in self._drafted:
                self._lengths.observe(*self._drafted[each.name], each.sampled - 1)
        lengths, drafts = self._lengths.choose(len(requests)), []
        self._drafted = {}
        for each in requests:
            draft, tokens = draft_of(each.params), []
            if len(draft) and each.limit:
                following, kind = continuation(draft, each.response, each.limit)
                tokens = following[: lengths[kind]].tolist()
                self._drafted[each.name] = kind, len(tokens)
            drafts.append(tokens)
        return drafts
