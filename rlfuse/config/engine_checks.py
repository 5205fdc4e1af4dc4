"""What is wrong with `rollout.engine_kwargs`: checks.py's part about sizes that the memory plan computes with.

Role and invariants: as checks.py. Pure. vLLM reads 0 bytes of KV cache as "not given", so that it would measure memory
that trainer ranks use at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config

COUNTS = frozenset(
    {"block_size", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override"}
)
SHARE = "gpu_memory_utilization"


def engine_sizes(config: Config, facts: Facts) -> Iterator[str]:
    """Yield a line for each size that is not positive. None is vLLM's default."""
    for name, value in config.rollout.engine_kwargs.items():
        key, number = f"rollout.engine_kwargs.{name}={value}", isinstance(value, int | float)
        if name in COUNTS and value is not None and not (number and value >= 1 and value == value // 1):
            yield f"{key}: must be a whole number of 1 or more; correct it, or leave it out for the default"
        if name == SHARE and not (number and 0 < value <= 1):
            yield f"{key}: must be above 0 and 1 or less; correct it, or set rollout.{SHARE}"
