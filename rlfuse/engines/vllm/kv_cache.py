"""Size the KV cache of a rollout engine on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_sizes import Shape

DRAFT_TOKENS = 4  # drafted at a time with fusion.tail_speculation
HEADROOM = 0.1  # share kept free where engine and ranks share a device; not measured
BLOCK = 128  # tokens of a block at most, over vLLM's attention backends
UNPLANNED = frozenset(
    {
        *("block_size", "num_gpu_blocks_override", "max_model_len", "hf_overrides", "speculative_config"),
        *("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "kv_cache_memory_bytes"),
    }
)
"""Keys of rollout.engine_kwargs that size the cache, or that a plan does not know."""


def max_kv_cache_bytes(config: Config, shape: Shape, item: int, step_tokens: int) -> float | None:
    """Return the bytes on each of an engine's devices that `rollout.max_num_seqs` samples of the longest kind take.
    `item`: bytes of a number; `step_tokens`: of an engine step at most. None where rollout.engine_kwargs decide."""
    if UNPLANNED & set(config.rollout.engine_kwargs):
        return None
    longest = config.data.max_prompt_length + config.data.max_response_length
    longest += DRAFT_TOKENS if config.fusion.tail_speculation else 0
    blocks = -(-longest // BLOCK)
    sample = shape.cache.bytes_of(blocks * BLOCK, item, config.rollout.tensor_model_parallel_size, step_tokens)
    sequences = config.rollout.engine_kwargs.get("max_num_seqs", config.rollout.max_num_seqs)
    return (sequences + 1) * sample  # one more for vLLM's null block, and for what it rounds up


class Bounds(NamedTuple):
    """Bytes that each device of an engine is given for its cache; None: vLLM measures what its share has left."""

    together: int | None  # where trainer ranks stay on the device, so that vLLM can't measure
    alternating: int | None


UNKNOWN = Bounds(None, None)


def size_kv_cache(share: float, used: float | None, given: Mapping[str, Any]) -> tuple[float, Bounds]:
    """Return the cache's bytes, and what vLLM is given for it. `share`: what an engine's share of the device has left
    for it; `used`: see `max_kv_cache_bytes`; `given`: its arguments."""
    if used is None:
        return given.get("kv_cache_memory_bytes") or share, UNKNOWN
    size = min(share, used)
    return size, Bounds(int(size) if size >= 1 else None, int(used) if used <= share else None)
