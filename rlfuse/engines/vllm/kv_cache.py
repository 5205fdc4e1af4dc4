"""Size the KV cache of a rollout engine on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlfuse.config.rollout import HISTORY
from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_sizes import Shape

DRAFT_TOKENS = 4  # draft tokens per step with fusion.tail_speculation
HISTORY_TOKENS = 16  # draft tokens per step from an earlier response
HEADROOM = 0.1  # fraction kept free if engine and ranks share a device; not measured
MAX_BLOCK_TOKENS = 128  # maximum tokens of a block in vLLM's attention backends
UNSUPPORTED_ARGUMENTS = frozenset(
    {
        *("block_size", "num_gpu_blocks_override", "max_model_len", "hf_overrides", "speculative_config"),
        *("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "kv_cache_memory_bytes"),
    }
)
"""Keys of rollout.engine_kwargs that determine the size of the cache, or that the memory plan does not support."""


def max_kv_cache_bytes(config: Config, shape: Shape, item: int, step_tokens: int) -> float | None:
    """Return the bytes per device of the KV cache of `rollout.max_num_seqs` samples of maximum length.

    `item`: bytes per number; `step_tokens`: maximum tokens of an engine step. None if rollout.engine_kwargs set the
    size.
    """
    if UNSUPPORTED_ARGUMENTS & set(config.rollout.engine_kwargs):
        return None
    longest = config.data.max_prompt_length + config.data.max_response_length
    history, tail = config.rollout.draft == HISTORY, config.fusion.tail_speculation > 0
    longest += HISTORY_TOKENS if history else DRAFT_TOKENS * tail
    blocks = -(-longest // MAX_BLOCK_TOKENS)
    sample = shape.cache.bytes_of(
        blocks * MAX_BLOCK_TOKENS, item, config.rollout.tensor_model_parallel_size, step_tokens
    )
    sequences = config.rollout.engine_kwargs.get("max_num_seqs", config.rollout.max_num_seqs)
    return (sequences + 1) * sample  # one more for vLLM's null block and rounding


class Bounds(NamedTuple):
    """KV cache sizes to pass to vLLM, in bytes per device; None: vLLM profiles the device and takes the rest of its
    share."""

    alongside_ranks: int | None  # if trainer ranks stay on the device, so that vLLM can't profile it
    alternating: int | None  # if engine and trainer ranks alternate on the device


UNKNOWN = Bounds(None, None)


def size_kv_cache(share: float, used: float | None, given: Mapping[str, Any]) -> tuple[float, Bounds]:
    """Return the bytes of the cache per device, and the sizes to pass to vLLM.

    `share`: bytes that the engine's share of the device leaves for the cache; `used`: see `max_kv_cache_bytes`;
    `given`: the engine's arguments.
    """
    if used is None:
        return given.get("kv_cache_memory_bytes") or share, UNKNOWN
    size = min(share, used)
    return size, Bounds(int(size) if size >= 1 else None, int(used) if used <= share else None)
