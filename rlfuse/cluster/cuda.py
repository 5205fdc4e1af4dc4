"""Settings for GPUs: environment variables, vLLM arguments and Ray shares, each with its reason. Pure data.

Defaults that this project relies on are set explicitly. `rollout.engine_kwargs` overrides vLLM's arguments, and the
environment overrides variables, except the FIXED. Sources: vLLM 0.32, torch 2.13, DeepSpeed 0.19.8, Ray 2.60.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlfuse.config.schema import Config, RolloutConfig

PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Of a rank's allocator: several threads touch the pages of pinned memory, which cudaHostAlloc does at 1.6 GB/s."""
PINNING_WHY = "models leave the device for pinned memory, which several threads register faster"
SHARE, ENCODER_SHARE, REWARD_SHARE = 0.4, 0.1, 0.1
"""Of a slot: its trainer rank and its rollout engine side by side, with clips vision towers, and reward models."""
COLLECTIVE_SHARE = 0.8
"""Of cluster.timeout_s: the longest that a collective waits on a GPU."""
BATCHED_TOKENS = 8192
GRAPHS = 512
"""Tokens of a step that CUDA graphs are captured for where rollout.max_num_seqs is smaller, as vLLM has it."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch reads it before PYTORCH_ALLOC_CONF, and vLLM's checks read it alone
DETERMINISTIC = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "VLLM_BATCH_INVARIANT")
STREAMS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "TORCH_NCCL_BLOCKING_WAIT",
)
FIXED = (ALLOCATOR, "DS_ACCELERATOR", *DETERMINISTIC, *STREAMS)
EVERYONE, RANKS, ENGINES = "all processes on GPUs", "trainer ranks", "rollout engines"


@dataclass(frozen=True, slots=True)
class Setting:
    """One that was chosen."""

    name: str
    value: str
    why: str
    where: str


def worker_settings() -> list[Setting]:
    """Variables of every process that may use a GPU, unless the kind of process has others."""
    return [
        Setting("DS_ACCELERATOR", "cuda", "a node started with another one would train on its CPUs", EVERYONE),
        Setting("NCCL_DEBUG", "WARN", "NCCL tells what failed; INFO: also what it chose", EVERYONE),
        Setting(
            ALLOCATOR,
            "expandable_segments:True",
            "clips and batches have many sizes, and a segment that grows has no gaps that are too small",
            "encoder ranks, if any",
        ),
    ]


def rank_settings(config: Config, threads: int | None = None) -> list[Setting]:
    """Variables of trainer ranks. `threads`: CPU cores for each of them, where the nodes are known."""
    dumps = config.run_folder / "stacks" / "nccl_rank_"
    return [
        _rank_allocator(config),
        Setting("DS_PIN_MEMORY_BACKEND", "torch", "`native` locks pages, which counts against `ulimit -l`", RANKS),
        Setting(
            "OMP_NUM_THREADS",
            "the node's cores / trainer.n_gpus_per_node" if threads is None else str(threads),
            "Ray gives an actor one: loading models, and AdamW with actor.offload_optimizer, would have a single core",
            RANKS,
        ),
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "after an error or a time-out of NCCL the process ends", RANKS),
        Setting("TORCH_NCCL_ENABLE_MONITORING", "1", "without it nothing is written when NCCL times out", RANKS),
        Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "the last collectives of each rank: who did not come", RANKS),
        Setting("TORCH_FR_BUFFER_SIZE", "2000", "so many of them", RANKS),
        Setting("TORCH_FR_DUMP_TEMP_FILE", str(dumps), "there, on the storage that all nodes share", RANKS),
        Setting(
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            str(math.ceil(config.cluster.timeout_s)),
            "cluster.timeout_s: a call of CUDA that takes long is no reason to end the process before",
            RANKS,
        ),
        *(pipeline_settings() if config.training.pipeline_parallel_size > 1 else ()),
    ]


def _rank_allocator(config: Config) -> Setting:
    trains_alone = config.trainer.task == "reward_model"
    if trains_alone or config.training.pipeline_parallel_size > 1 or config.rollout.weight_transfer == "shm":
        why = "micro-batches have many sizes, and no weights are shared by CUDA IPC"
        return Setting(ALLOCATOR, f"expandable_segments:True,{PINNING}", f"{why}; {PINNING_WHY}", RANKS)
    return Setting(
        ALLOCATOR,
        f"expandable_segments:False,{PINNING}",
        "weights go to the engine by CUDA IPC, which opens expandable segments by pidfd_getfd: that needs the right to "
        "trace a sibling, which containers refuse (rollout.weight_transfer=shm does without); " + PINNING_WHY,
        RANKS,
    )


def pipeline_settings() -> list[Setting]:
    """Variables of ranks with stages of a pipeline: receives wait beside what computes."""
    ranks = "trainer ranks, where training.pipeline_parallel_size is above 1"
    return [
        Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32", "of 8, streams share some: what waits holds others up", ranks),
        Setting(
            "CUDA_MODULE_LOADING",
            "EAGER",
            "a kernel that loads at its first call may wait for all that run, and so for a peer; costs memory and "
            "seconds at the start",
            ranks,
        ),
        Setting("NCCL_LAUNCH_ORDER_IMPLICIT", "0", "1 puts all transfers in one order, in which they deadlock", ranks),
        Setting("TORCH_NCCL_BLOCKING_WAIT", "0", "1 makes waits hold the host, which then posts no receive", ranks),
        Setting(
            "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
            "0",
            "a group has two ranks and one direction, where calls in order are right",
            ranks,
        ),
    ]


def engine_settings(dtype: str | None = None) -> list[Setting]:
    """Variables of processes with a vLLM engine; `dtype`: of its weights."""
    settings = [
        Setting(
            ALLOCATOR,
            "expandable_segments:False",
            "sleep frees memory pools, which can't be expandable (pytorch#147851)",
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
            "vLLM imports FlashInfer at startup unless it is off; seeded samples and processed log-probs never use it",
            f"{ENGINES}, reward models if any",
        ),
    ]
    if dtype == "float32":
        why = "Triton multiplies float32 in TF32 by default, and attention would differ from the trainer's by 1e-3 nats"
        settings.append(Setting("TRITON_F32_DEFAULT", "ieee", why, ENGINES))
    return settings


def engine_dtype(config: Config) -> str:
    """Return the dtype of the rollout engines' weights."""
    return config.rollout.engine_kwargs.get("dtype", config.model.dtype)


def deterministic_settings(config: Config) -> list[Setting]:
    """Return variables of trainer ranks and engines with trainer.deterministic."""
    if not config.trainer.deterministic:
        return []
    reasons = (
        (":4096:8", "matrix products have workspaces of their own, else streams change how they are summed"),
        ("1", "the backward pass of attention sums in one order"),
        ("1", "log-probs do not depend on what is decoded beside"),
    )
    where = (RANKS, RANKS, ENGINES)
    return [Setting(name, *reason, at) for name, reason, at in zip(DETERMINISTIC, reasons, where, strict=True)]


def environment(settings: Iterable[Setting], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a process; `given`: those of this one."""
    return {each.name: each.value for each in _with_given(settings, given)}


def _with_given(settings: Iterable[Setting], given: Mapping[str, str]) -> list[Setting]:
    free = given.keys() - FIXED
    return [
        replace(each, value=given[each.name], why="as set where the job is started") if each.name in free else each
        for each in settings
    ]


def engine_arguments(rollout: RolloutConfig, max_model_len: int) -> dict[str, Any]:
    """vLLM's arguments for an engine that shares its GPU with a trainer rank."""
    most = rollout.max_num_seqs * max_model_len
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": True,
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": min(max(BATCHED_TOKENS, rollout.max_num_seqs), most),
    }
    if rollout.tensor_model_parallel_size == 1:  # workers of a wider one are Ray actors
        arguments["distributed_executor_backend"] = "mp"
    if "speculative_config" not in rollout.engine_kwargs:  # of which vLLM knows whether it goes with it
        arguments["async_scheduling"] = True
    if not GRAPH_ARGUMENTS & set(rollout.engine_kwargs):
        arguments["cudagraph_capture_sizes"] = graph_sizes(rollout.max_num_seqs)
    return arguments


GRAPH_ARGUMENTS = frozenset(
    {"compilation_config", "cudagraph_capture_sizes", "enforce_eager", "max_cudagraph_capture_size", "max_num_seqs"}
    | {"performance_mode", "speculative_config"}
)
"""Keys of rollout.engine_kwargs by which a user chooses the sizes of CUDA graphs, or what they depend on."""


def graph_sizes(sequences: int) -> list[int]:
    """Return batch sizes for CUDA graphs: `SIZES`, every 128th up to twice `sequences`, and `sequences`."""
    largest = max(sequences, min(2 * sequences, GRAPHS))
    return sorted({size for size in (*SIZES, *range(384, largest, 128)) if size < largest} | {sequences, largest})


WHY = {
    "gpu_memory_utilization": "rollout.gpu_memory_utilization: share of the whole device for weights, graphs, "
    "activations and KV cache; vLLM does not start where less is free",
    "enable_sleep_mode": "the engine leaves the device to the trainer; its addresses stay, so its CUDA graphs do",
    "enforce_eager": "decoding runs CUDA graphs: launching its kernels one by one would take longer than they do",
    "enable_prefix_caching": "the rollout.n responses of a prompt, and moved samples, prefill it once",
    "enable_chunked_prefill": "a long prompt does not stop the samples that decode",
    "max_num_batched_tokens": "tokens of a step: vLLM takes 2048 for an engine inside another program, 8192 or more "
    "for its own offline use; the memory plan counts as many",
    "async_scheduling": "the next step is scheduled while the device computes",
    "distributed_executor_backend": "the model runner launches kernels in a separate process while the engine core "
    "schedules; uni runs both in one",
    "cudagraph_capture_sizes": f"a quarter as many as vLLM captures, which takes seconds at startup; vLLM's end at "
    f"{GRAPHS} tokens, and wider batches run without graphs",
}


def gpu_settings(
    config: Config, given: Mapping[str, str] = os.environ, planned: Mapping[str, Any] | None = None
) -> list[Setting]:
    """Return all settings for a job on GPUs. `given`: environment; `planned`: arguments of its memory plan."""
    if config.cluster.device == "cpu":
        return []
    limit = Setting(
        "time limit of a collective",
        f"{collective_limit_s(config):g} s",
        f"{COLLECTIVE_SHARE:g} of cluster.timeout_s: torch names the collective before the call that it belongs to is "
        "given up",
        RANKS,
    )
    chosen = [*worker_settings(), *rank_settings(config), *deterministic_settings(config)]
    if config.trainer.task == "reward_model":
        return [*_with_given(chosen, given), limit]
    return [
        *_with_given([*chosen, *engine_settings(engine_dtype(config))], given),
        limit,
        *_arguments(config.rollout, config.data.max_prompt_length + config.data.max_response_length, planned or {}),
        _shares(config),
    ]


def _arguments(rollout: RolloutConfig, max_model_len: int, planned: Mapping[str, Any]) -> list[Setting]:
    found = []
    for name, value in (engine_arguments(rollout, max_model_len) | planned).items():
        if name in rollout.engine_kwargs:
            value, why = rollout.engine_kwargs[name], "as rollout.engine_kwargs says"
        elif name in planned:
            why = "by the memory plan: the KV cache that a step can use; no sleep where both sides fit on the device"
        else:
            why = WHY[name]
        found.append(Setting(name, str(value), why, ENGINES))
    return found


def collective_limit_s(config: Config) -> float:
    """Longest time that a collective of trainer ranks waits on GPUs."""
    return COLLECTIVE_SHARE * config.cluster.timeout_s


def encoder_place(index: int, ranks: int, slots: int) -> tuple[int, float]:
    """(slot, share of it) of one of `ranks` encoder ranks: spread over all slots, so over all nodes and their CPUs."""
    return index * slots // ranks, ENCODER_SHARE / -(-ranks // slots)


def reward_place(index: int, models: int, slots: int) -> tuple[int, float]:
    """Return (slot, share) of one of `models` reward models, from the last slot on; at most REWARD_SHARE each slot."""
    return slots - 1 - index % slots, REWARD_SHARE / -(-models // slots)


def _shares(config: Config) -> Setting:
    return Setting(
        "Ray's shares of a slot",
        f"{SHARE:g} + {SHARE:g} + at most {ENCODER_SHARE:g} + {REWARD_SHARE:g}",
        f"rank, engine, encoder ranks, reward models: {2 * SHARE + ENCODER_SHARE + REWARD_SHARE:g} at most, or one of "
        "them waits for ever. Ray only counts: memory is shared by taking turns, and by rollout.gpu_memory_utilization",
        EVERYONE,
    )
