"""Environment variables and arguments of vLLM engines on GPUs, each with its reason.

Defaults that a run relies on are set explicitly. `rollout.engine_kwargs` overrides arguments. Source: vLLM 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlfuse.cluster import cuda
from rlfuse.cluster.cuda import ALLOCATOR, ENGINES, Setting, with_given
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config

BATCHED_TOKENS = 8192
MAX_GRAPH_TOKENS = 512
"""Maximum tokens of a CUDA graph if rollout.max_num_seqs is smaller, as in vLLM."""
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


def engine_settings(dtype: str | None = None) -> list[Setting]:
    """Return the variables of processes with a vLLM engine; `dtype`: of its weights."""
    settings = [
        Setting(
            ALLOCATOR,
            "expandable_segments:False",
            "sleep mode uses memory pools, which can't be expandable (pytorch#147851)",
            f"{ENGINES}, reward models if any",
        ),
        Setting(
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
            "1",
            "CUDA graphs count towards rollout.gpu_memory_utilization: they stay on the device while the engine sleeps",
            ENGINES,
        ),
        Setting(
            "VLLM_USE_FLASHINFER_SAMPLER",
            "0",
            "vLLM would import FlashInfer at startup; seeded samples and processed log-probs never use it",
            f"{ENGINES}, reward models if any",
        ),
    ]
    if dtype == "float32":
        why = "Triton multiplies float32 in TF32 by default; log-probs would differ from the trainer's by 1e-3 nats"
        settings.append(Setting("TRITON_F32_DEFAULT", "ieee", why, ENGINES))
    return settings


def engine_dtype(config: Config) -> str:
    """Return the dtype of the rollout engines' weights."""
    return config.rollout.engine_kwargs.get("dtype", config.model.dtype)


def deterministic_settings(config: Config) -> list[Setting]:
    """Return the variable of engines with trainer.deterministic; the environment does not override it."""
    why = "log-probs do not depend on the rest of the batch"
    return [Setting("VLLM_BATCH_INVARIANT", "1", why, ENGINES)] * config.trainer.deterministic


def gpu_arguments(rollout: RolloutConfig, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of an engine that shares its GPU with a trainer rank."""
    most = rollout.max_num_seqs * max_model_len
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": True,
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": min(max(BATCHED_TOKENS, rollout.max_num_seqs), most),
    }
    if rollout.tensor_model_parallel_size == 1:  # with tensor parallelism, workers are Ray actors
        arguments["distributed_executor_backend"] = "mp"
    if "speculative_config" not in rollout.engine_kwargs:  # vLLM decides whether both are compatible
        arguments["async_scheduling"] = True
    if not GRAPH_ARGUMENTS & set(rollout.engine_kwargs):
        arguments["cudagraph_capture_sizes"] = graph_sizes(rollout.max_num_seqs)
    return arguments


GRAPH_ARGUMENTS = frozenset(
    {"compilation_config", "cudagraph_capture_sizes", "enforce_eager", "max_cudagraph_capture_size", "max_num_seqs"}
    | {"performance_mode", "speculative_config"}
)
"""Keys of rollout.engine_kwargs that determine the sizes of CUDA graphs."""


def graph_sizes(sequences: int) -> list[int]:
    """Return batch sizes for CUDA graphs: `GRAPH_SIZES`, every 128th up to twice `sequences`, and `sequences`."""
    largest = max(sequences, min(2 * sequences, MAX_GRAPH_TOKENS))
    return sorted({size for size in (*GRAPH_SIZES, *range(384, largest, 128)) if size < largest} | {sequences, largest})


REASONS = {
    "gpu_memory_utilization": "rollout.gpu_memory_utilization: fraction of the device for weights, graphs, "
    "activations and KV cache; vLLM does not start if less is free",
    "enable_sleep_mode": "the engine frees the device for the trainer; addresses and CUDA graphs stay valid",
    "enforce_eager": "decoding uses CUDA graphs, as launching kernels one by one takes longer than running them",
    "enable_prefix_caching": "the rollout.n responses of a prompt, and migrated samples, prefill it once",
    "enable_chunked_prefill": "a long prompt does not stall decoding",
    "max_num_batched_tokens": "tokens of a step; vLLM's default is 2048 for an engine inside another program, 8192 or "
    "more for offline use; the memory plan assumes this value",
    "async_scheduling": "the next step is scheduled while the device computes",
    "distributed_executor_backend": "the model runner launches kernels in a separate process while the engine core "
    "schedules; uni runs both in one process",
    "cudagraph_capture_sizes": f"a quarter as many as vLLM captures by default, which takes seconds at startup; vLLM's "
    f"end at {MAX_GRAPH_TOKENS} tokens, and larger batches run without graphs",
}


def gpu_settings(
    config: Config, given: Mapping[str, str] = os.environ, planned: Mapping[str, Any] | None = None
) -> list[Setting]:
    """Return all settings of a job on GPUs. `given`: environment; `planned`: engine arguments of its memory plan."""
    if config.cluster.device == "cpu":
        return []
    ranks = [*cuda.worker_settings(), *cuda.rank_settings(config), *cuda.deterministic_settings(config)]
    if config.trainer.is_offline:
        return [*with_given(ranks, given), cuda.collective_limit(config)]
    return [
        *with_given([*ranks, *engine_settings(engine_dtype(config))], given),
        *deterministic_settings(config),
        cuda.collective_limit(config),
        *_arguments(config.rollout, config.data.max_prompt_length + config.data.max_response_length, planned or {}),
        cuda.shares(),
    ]


def _arguments(rollout: RolloutConfig, max_model_len: int, planned: Mapping[str, Any]) -> list[Setting]:
    found = []
    for name, value in (gpu_arguments(rollout, max_model_len) | planned).items():
        if name in rollout.engine_kwargs:
            value, why = rollout.engine_kwargs[name], "set by rollout.engine_kwargs"
        elif name in planned:
            why = "set by the memory plan: the KV cache that a step can use; no sleep mode if engine and ranks both fit"
        else:
            why = REASONS[name]
        found.append(Setting(name, str(value), why, ENGINES))
    return found
