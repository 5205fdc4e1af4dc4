"""Arguments that vLLM passes to its workers unchanged: of requests (`SamplingParams.extra_args`) and of the engine.

Role: written by `setup`, read in the engine process. Imports no vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DRAWN = "rlfuse_drawn"
"""Key: number of tokens at the end of the prompt that are part of the response."""
DRAFT = "rlfuse_draft"
"""Key: an earlier response with the same seed, as bytes of int32."""

HISTORY_ENGINE = "rlfuse_history"
"""Key of `VllmConfig.additional_config`: draft from earlier responses, in the V2 model runner."""


def drawn_tokens(params: Any) -> int:
    """Return the number of tokens at the end of the prompt that are part of the response."""
    return (params.extra_args or {}).get(DRAWN, 0)


def draft_of(params: Any) -> np.ndarray:
    """Return the earlier response, int32 [T]; empty if there is none."""
    return np.frombuffer((params.extra_args or {}).get(DRAFT, b""), np.int32)
