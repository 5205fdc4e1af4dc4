"""trainer.deterministic: what processes need so that the same work gives the same bits.

Role: read by whoever starts ranks and engines, and by the ranks. The configuration's part is in `config.checks`: what
depends on timing (which samples are added up first, which degree a sequence is cut in) is refused there.
"""

from __future__ import annotations

import torch

from rlfuse.cluster import cuda
from rlfuse.config.schema import Config


def environment(config: Config, device: str) -> dict[str, str]:
    """Of trainer ranks and engines. Not run without GPUs, where it has something in it."""
    return cuda.environment(cuda.deterministic_settings(config)) if device == "cuda" else {}


def hold(config: Config) -> None:
    """In a rank, before it computes: operations without a deterministic implementation raise."""
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # or ZeRO's buffers of 2 GB are written each time
