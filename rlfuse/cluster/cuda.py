"""Settings for GPUs: environment variables and Ray shares, each with its reason. Pure data.

Defaults that this project relies on are set explicitly. The environment overrides variables, except the FIXED. Sources:
torch 2.13, DeepSpeed 0.19.8, Ray 2.60.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rlfuse.config.schema import Config

PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Allocator option of ranks: several threads register pinned memory; cudaHostAlloc alone reaches 1.6 GB/s."""
PINNING_WHY = "models leave the device for pinned memory, which several threads register faster"
SHARE, ENCODER_SHARE, REWARD_SHARE = 0.4, 0.1, 0.1
"""Ray shares of a slot: SHARE each for trainer rank and rollout engine, then vision towers (with clips) and reward
models."""
COLLECTIVE_SHARE = 0.8
"""Time limit of a collective on GPUs, as a fraction of cluster.timeout_s."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch reads it before PYTORCH_ALLOC_CONF, and engines check it alone
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", "one workspace per matrix product, else streams change how they are summed"),
    "FLASH_ATTENTION_DETERMINISTIC": ("1", "the backward pass of attention sums in one order"),
}
STREAMS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "TORCH_NCCL_BLOCKING_WAIT",
)
FIXED = (ALLOCATOR, "DS_ACCELERATOR", *DETERMINISTIC, *STREAMS)
ALL_PROCESSES, RANKS, ENGINES = "all processes on GPUs", "trainer ranks", "rollout engines"


@dataclass(frozen=True, slots=True)
class Setting:
    """A chosen setting with its reason."""

    name: str
    value: str
    why: str
    where: str


def worker_settings() -> list[Setting]:
    """Return the variables of every process that may use a GPU, unless its kind overrides them."""
    return [
        Setting("DS_ACCELERATOR", "cuda", "a node started with another value would train on its CPUs", ALL_PROCESSES),
        Setting("NCCL_DEBUG", "WARN", "NCCL logs failures; INFO also logs its choices", ALL_PROCESSES),
        Setting(
            ALLOCATOR,
            "expandable_segments:True",
            "clips and batches have many sizes; segments that grow avoid fragmentation",
            "encoder ranks, if any",
        ),
    ]


def rank_settings(config: Config, threads: int | None = None) -> list[Setting]:
    """Return the variables of trainer ranks. `threads`: CPU cores per rank, if the nodes are known."""
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
        Setting("TORCH_NCCL_ENABLE_MONITORING", "1", "required for dumps when NCCL times out", RANKS),
        Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "dumps the last collectives of each rank", RANKS),
        Setting("TORCH_FR_BUFFER_SIZE", "2000", "number of collectives in a dump", RANKS),
        Setting("TORCH_FR_DUMP_TEMP_FILE", str(dumps), "path of the dumps, on shared storage", RANKS),
        Setting(
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            str(math.ceil(config.cluster.timeout_s)),
            "as cluster.timeout_s: a long CUDA call must not end the process earlier",
            RANKS,
        ),
        *(pipeline_settings() if config.training.pipeline_parallel_size > 1 else ()),
    ]


def _rank_allocator(config: Config) -> Setting:
    trains_alone = config.trainer.is_offline
    if trains_alone or config.training.pipeline_parallel_size > 1 or config.rollout.weight_transfer == "shm":
        why = "micro-batches have many sizes, and no weights are shared by CUDA IPC"
        return Setting(ALLOCATOR, f"expandable_segments:True,{PINNING}", f"{why}; {PINNING_WHY}", RANKS)
    return Setting(
        ALLOCATOR,
        f"expandable_segments:False,{PINNING}",
        "weights go to the engine by CUDA IPC, which opens expandable segments by pidfd_getfd. That needs ptrace "
        "permission, which containers deny (rollout.weight_transfer=shm does not need it); " + PINNING_WHY,
        RANKS,
    )


def pipeline_settings() -> list[Setting]:
    """Return the variables of ranks with pipeline stages, whose receives wait while kernels compute."""
    ranks = "trainer ranks, where training.pipeline_parallel_size is above 1"
    return [
        Setting(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "32",
            "with 8, streams share connections, so a waiting receive blocks kernels",
            ranks,
        ),
        Setting(
            "CUDA_MODULE_LOADING",
            "EAGER",
            "lazy loading of a kernel may wait for all running kernels, and so for a peer; costs memory and seconds "
            "at startup",
            ranks,
        ),
        Setting("NCCL_LAUNCH_ORDER_IMPLICIT", "0", "1 serializes all transfers, which deadlocks", ranks),
        Setting("TORCH_NCCL_BLOCKING_WAIT", "0", "1 makes waits block the host, which then posts no receive", ranks),
        Setting(
            "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
            "0",
            "each group has two ranks and one direction, so serialized calls are correct",
            ranks,
        ),
    ]


def deterministic_settings(config: Config) -> list[Setting]:
    """Return variables of trainer ranks and engines with trainer.deterministic."""
    return [Setting(name, *reason, RANKS) for name, reason in DETERMINISTIC.items()] * config.trainer.deterministic


def environment(settings: Iterable[Setting], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a process. `given`: the environment of this process."""
    return {each.name: each.value for each in with_given(settings, given)}


def with_given(settings: Iterable[Setting], given: Mapping[str, str]) -> list[Setting]:
    """Return the settings with the values of those variables that the environment overrides."""
    free = given.keys() - FIXED
    return [
        replace(each, value=given[each.name], why="as set in the environment of the job") if each.name in free else each
        for each in settings
    ]


def collective_limit_s(config: Config) -> float:
    """Return the time limit in seconds of a collective of trainer ranks on GPUs."""
    return COLLECTIVE_SHARE * config.cluster.timeout_s


def collective_limit(config: Config) -> Setting:
    """Return the time limit of collectives as a setting."""
    why = "so that torch reports the collective before the call times out"
    value, share = f"{collective_limit_s(config):g} s", f"{COLLECTIVE_SHARE:g} of cluster.timeout_s"
    return Setting("time limit of a collective", value, f"{share}: {why}", RANKS)


def encoder_place(index: int, ranks: int, slots: int) -> tuple[int, float]:
    """Return (slot, share) of one of `ranks` encoder ranks, spread over all slots, nodes and their CPUs."""
    return index * slots // ranks, ENCODER_SHARE / -(-ranks // slots)


def reward_place(index: int, models: int, slots: int) -> tuple[int, float]:
    """Return (slot, share) of one of `models` reward models, from the last slot on; at most REWARD_SHARE each slot."""
    return slots - 1 - index % slots, REWARD_SHARE / -(-models // slots)


def shares() -> Setting:
    """Return what Ray counts of a slot for each kind of process."""
    return Setting(
        "Ray's shares of a slot",
        f"{SHARE:g} + {SHARE:g} + at most {ENCODER_SHARE:g} + {REWARD_SHARE:g}",
        f"rank, engine, encoder ranks, reward models: {2 * SHARE + ENCODER_SHARE + REWARD_SHARE:g} at most, or one of "
        "them waits for ever. Ray only counts: memory is shared by taking turns, and by rollout.gpu_memory_utilization",
        ALL_PROCESSES,
    )
