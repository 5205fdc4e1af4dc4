"""Derive from a memory plan how engine and trainer ranks share a device."""

from __future__ import annotations

from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import GIB, Memory
from rlfuse.engines.memory.residency import ENGINE, GENERATING, MODELS, SYNC, Item
from rlfuse.engines.vllm.kv_cache import HEADROOM
from rlfuse.protocols import DeviceSharing


def device_sharing(memory: Memory) -> DeviceSharing:
    """Return how trainer ranks share this device with an engine."""
    total, models = memory.budget.bytes, int(memory.size_of(MODELS))
    if not memory.alternates:
        others = memory.size_of(ENGINE | {Item.RESIDENTS, Item.LAYER})
        return DeviceSharing(alternates=False, max_rank_bytes=int(total - others))
    free = {phase: int((1 - HEADROOM) * total - memory.total(phase)) for phase in (GENERATING, SYNC)}
    return DeviceSharing(
        max_cached_bytes=max(0, free[GENERATING]), max_cached_bytes_in_push=max(0, free[SYNC]), pinned_host_bytes=models
    )


def describe_sharing(config: Config, memory: Memory) -> list[str]:
    """Return a description of how an engine and its ranks share a GPU, and of the size of the KV cache."""
    fullest, limit = memory.total(memory.tightest) / GIB, memory.budget.bytes / GIB
    if memory.alternates:
        turns = "engine and trainer rank alternate on the device"
    else:
        turns = f"engine and trainer rank both stay on the device, {fullest:.1f} of {limit:.1f} GiB at most"
    if (given := memory.kv_cache_bytes) is None:
        return [turns, "the KV cache uses the rest of rollout.gpu_memory_utilization"]
    longest = config.data.max_prompt_length + config.data.max_response_length
    cache = f"{given / GIB:.2f} GiB of KV cache"
    return [turns, f"{cache}, at most what rollout.max_num_seqs samples of {longest} tokens need"]
