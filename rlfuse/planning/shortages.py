"""Describe what of a configuration does not fit a device, its engine's cache or its host's memory."""

from __future__ import annotations

from rlfuse.config.schema import Config
from rlfuse.planning.memory import GIB, Memory


def problems(config: Config, memory: Memory) -> list[str]:
    """One line for each thing that does not fit: what, by how much, its largest parts. `remedies` says what helps."""
    found = []
    longest = config.data.max_prompt_length + config.data.max_response_length
    if memory.kv_tokens < longest:
        key = "rollout.gpu_memory_utilization" if memory.budget.device == "cuda" else "rollout.kv_cache_memory_mb"
        have = f"room for {memory.kv_tokens} tokens" if memory.kv_tokens > 0 else "no room beside the engine's weights"
        found.append(
            f"generating: the KV cache has {have}, the longest sample needs {longest} (data.max_prompt_length + "
            f"data.max_response_length); {key}={getattr(config.rollout, key.split('.')[1])}, "
            f"rollout.tensor_model_parallel_size={config.rollout.tensor_model_parallel_size}"
        )
    for phase in memory.phases:
        total = memory.total(phase)
        if total > memory.budget.bytes:
            found.append(_too_much(memory, phase, total))
    waiting, host = memory.host * config.trainer.n_gpus_per_node, memory.budget.host
    if host is not None and waiting > host:
        found.append(
            f"a node's host memory: needs {waiting / GIB:.1f} GiB, pinned for what is off its "
            f"{config.trainer.n_gpus_per_node} devices, of {host / GIB:.1f} (host_memory_gb); "
            f"actor.zero_stage={config.actor.zero_stage}, actor.offload_optimizer={config.actor.offload_optimizer}"
        )
    return found


def _too_much(memory: Memory, phase: str, total: float) -> str:
    inside = sorted(memory.of(phase), key=lambda part: -part.size)
    largest = ", ".join(f"{part.role}'s {part.what} {part.size / GIB:.2f}" for part in inside[:3])
    over, limit = total - memory.budget.bytes, memory.budget.bytes
    where = f"{phase}: " if memory.budget.device == "cuda" else ""
    return (
        f"{where}needs {total / GIB:.2f} GiB of a device's {limit / GIB:.2f}, {over / GIB:.2f} too many. The largest: "
        f"{largest}."
    )
