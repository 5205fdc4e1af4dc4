"""Ray for one run: the cluster, one placement bundle per slot, and actors on those slots.

Role: the only place that starts Ray and creates the actors of slots. A slot is one device: on GPUs its trainer rank and
its rollout engine share the device (colocated), on CPU hosts they share the cores. Actors ask for a custom resource of
their bundle and no CPU: a fractional CPU that does not fit would make them wait for ever.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlfuse.cluster.children import heed_children
from rlfuse.config.schema import Config
from rlfuse.engines.protocols import EngineError

# One thread per process: slots share the cores of a CPU host, and two OpenMP pools on one core cost 10x (measured).
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "DEEPSPEED_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

SHARE, ENCODER_SHARE = 0.45, 0.1
"""Of a slot: its trainer rank and its rollout engine live side by side, and with clips a vision tower."""


def choose_device(config: Config) -> str:
    """`cpu` or `cuda`, as cluster.device says or as this machine has."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Slots:
    """The devices of a run, reserved."""

    group: PlacementGroup
    count: int
    device: str
    cores: tuple[int, ...] | None = None
    """On a CPU host with enough of them: the core of each slot. Its engine and its rank are bound to it, so that a slot
    is a device of its own that changes hands."""

    def engine_options(self, slot: int, width: int, environment: dict[str, str]) -> dict:
        """Options of the actor of a rollout engine that spans `width` slots from `slot` on.

        On GPUs a wider engine's own workers are Ray actors that vLLM places in our bundles; the actor itself then only
        hosts the front end. Not run without GPUs.
        """
        if self.device == "cuda" and width > 1:
            bundles = ",".join(str(slot + i) for i in range(width))
            environment = environment | {"VLLM_RAY_BUNDLE_INDICES": bundles, "VLLM_RAY_PER_WORKER_GPUS": str(SHARE)}
            capturing = PlacementGroupSchedulingStrategy(self.group, slot, placement_group_capture_child_tasks=True)
            options = self.options(slot, SHARE, environment, scheduling_strategy=capturing)
            return options | {"num_gpus": 0, "resources": {}}
        return self.options(slot, SHARE, environment)

    def options(self, slot: int, share: float, environment: dict[str, str] | None = None, **more: Any) -> dict:
        """Options of an actor that lives on `slot` and takes `share` of its device."""
        return {
            "num_cpus": 0,
            "num_gpus": share if self.device == "cuda" else 0,
            "resources": {"slot": share},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, slot),
            "runtime_env": {"env_vars": worker_environment(self.device) | (environment or {})},
        } | more


def worker_environment(device: str) -> dict[str, str]:
    """Environment of every worker process."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = {"TORCH_EXTENSIONS_DIR": extensions} if extensions else {}
    return QUIET | (CPU_ENVIRONMENT if device == "cpu" else {}) | cache


def start(config: Config) -> Slots:
    """Start or join Ray and reserve the slots, spread over nodes as trainer.nnodes says; bounded by the time-out."""
    device = choose_device(config)
    os.environ.update({name: value for name, value in QUIET.items() if name.startswith("RAY_")})
    if device == "cpu":
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else DeepSpeed warns, in this process too, that it finds no GPU
    # The engine's own child processes end with it, also when it is killed.
    os.environ["RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"] = "true"  # noqa: SIM112
    if config.cluster.ray_address is None:
        _need_shared_memory()
        _start_ray(config)
    else:
        ray.init(address=config.cluster.ray_address, log_to_driver=False)
    heed_children()
    bundle = {"slot": 1, "CPU": 0.01} | ({"GPU": 1} if device == "cuda" else {})
    group = placement_group([bundle] * config.slots, strategy="PACK")
    if not group.wait(min(60.0, config.cluster.timeout_s)):
        have = {name: amount for name, amount in ray.cluster_resources().items() if name in ("slot", "GPU", "CPU")}
        remove_placement_group(group)
        raise EngineError(
            f"Ray could not reserve {config.slots} slots ({bundle} each; trainer.nnodes={config.trainer.nnodes} * "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}). The cluster has {have}. Lower "
            "trainer.n_gpus_per_node, or start the nodes with --resources='{\"slot\": N}'."
        )
    return Slots(group, config.slots, device, _cores(config, device))


def _cores(config: Config, device: str) -> tuple[int, ...] | None:
    if device != "cpu" or config.cluster.ray_address is not None or config.rollout.tensor_model_parallel_size > 1:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[: config.slots]) if len(cores) >= config.slots else None


def _start_ray(config: Config, attempts: int = 3) -> None:
    """A cluster of this run's own. Ray gives its helpers 15 s to start, too few on a laptop under load: try again."""
    for attempt in range(attempts):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                resources={"slot": config.slots},
                num_cpus=max(os.cpu_count() or 1, config.slots),
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt + 1 == attempts:
                raise EngineError(
                    f"Ray did not start on this machine in {attempts} attempts ({str(error).strip().splitlines()[0]}). "
                    "Its logs are in /tmp/ray/session_latest/logs; an overloaded machine or a full disk are usual."
                ) from error


def stop() -> None:
    """Leave Ray; a cluster that `start` began ends with all its processes."""
    ray.shutdown()


def shared_memory_speed(megabytes: int = 16) -> float:
    """Bytes per second through /dev/shm, written once and read once."""
    block, began = bytes(megabytes << 20), time.perf_counter()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(block)
        file.seek(0)
        file.read()
    return len(block) / (time.perf_counter() - began)


def _need_shared_memory(at_least_mb: int = 256) -> None:
    free = shutil.disk_usage("/dev/shm").free >> 20
    if free < at_least_mb:
        raise EngineError(
            f"/dev/shm has {free} MiB free, Ray and the weight sync need at least {at_least_mb} MiB. Remove left-overs "
            "there, or enlarge it (docker run --shm-size=2g, mount -o remount,size=2g /dev/shm)."
        )
