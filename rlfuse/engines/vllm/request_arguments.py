"""Arguments that vLLM passes to its workers unchanged: of requests (`SamplingParams.extra_args`) and of the engine.

Role: written by `setup`, read in the engine process. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

DRAWN = "rlfuse_drawn"
"""Key: number of tokens at the end of the prompt that are part of the response."""
DRAFT = "rlfuse_draft"
"""Key: the earlier responses of a request, joined by `join_drafts`."""
SEPARATOR = -1
"""Between earlier responses; no token equals it."""

HISTORY_ENGINE = "rlfuse_history"
"""Key of `VllmConfig.additional_config`: the engine drafts from earlier responses."""


def drawn_tokens(params: Any) -> int:
    """Return the number of tokens at the end of the prompt that are part of the response."""
    return (params.extra_args or {}).get(DRAWN, 0)


def join_drafts(drafts: Sequence[np.ndarray]) -> bytes:
    """Return earlier responses as bytes of int32, with a SEPARATOR between them."""
    separator = np.array([SEPARATOR], np.int32).tobytes()
    return separator.join(each.astype(np.int32, copy=False).tobytes() for each in drafts)


def has_draft(params: Any) -> bool:
    """Return whether the request has earlier responses."""
    return DRAFT in (params.extra_args or {})


def draft_of(params: Any) -> np.ndarray:
    """Return the earlier responses, int32, with a SEPARATOR between them; empty if there are none."""
    return np.frombuffer((params.extra_args or {}).get(DRAFT, b""), np.int32)


def drafts_from_history(vllm_config: Any) -> bool:
    """Return whether the engine drafts from earlier responses."""
    return HISTORY_ENGINE in vllm_config.additional_config
