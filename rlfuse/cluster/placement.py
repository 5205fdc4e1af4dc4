"""Ray for one run: the cluster, one placement bundle per slot, and actors on those slots.

Role: the only place that starts Ray and creates the actors of slots. A slot is one device: on GPUs its trainer rank and
its rollout engine share the device (colocated), on CPU hosts they share the cores. Actors ask for a custom resource of
their bundle and no CPU: a fractional CPU that does not fit would make them wait for ever.
Invariant: slots fill trainer.nnodes nodes one after the other, trainer.n_gpus_per_node on each, as `planning.placing`
says; what lives on a slot lives on its node.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlfuse.cluster.children import heed_children, own_sigterm
from rlfuse.cluster.nodes import Node, choose, here, live, present
from rlfuse.config.schema import Config
from rlfuse.engines.protocols import EngineError
from rlfuse.observe import watchdog

# One thread per process: slots share the cores of a CPU host, and two OpenMP pools on one core cost 10x (measured).
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_task_events_report_interval_ms": "0",  # every call of a run would be kept, for Ray's dashboard
    "DEEPSPEED_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

LOOPBACK = "127.0.0.1"
JOINING_S = 60.0
"""For nodes to join a cluster, and others' jobs to leave it."""
PLACING_S = 5.0
"""For Ray to reserve what is free."""
SHARE, ENCODER_SHARE, REWARD_SHARE = 0.4, 0.1, 0.1
"""Of a slot: its trainer rank and its rollout engine side by side, with clips a vision tower, and reward models."""


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
    nodes: tuple[Node, ...] = ()
    """Each holds as many slots, in order."""

    def living(self, engine_width: int = 0) -> dict[Node, str]:
        """Who lives on each node; `engine_width`: slots of a rollout engine, 0 if there are none."""
        per_node, found = self.count // len(self.nodes), {}
        for first, node in zip(range(0, self.count, per_node), self.nodes, strict=True):
            slots = range(first, first + per_node)
            engines = [f"rollout/{slot // engine_width}" for slot in slots[::engine_width]] if engine_width else []
            found[node] = ", ".join((*engines, *(f"trainer/{slot}" for slot in slots)))
        return found

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


def reward_options(index: int, models: int, slots: Slots | None, on: str, environment: dict[str, str]) -> dict:
    """Options of the actor of the `index`-th of a run's reward models and judges, `on` cpu or cuda.

    On GPUs not run here, for lack of one.
    """
    if on == "cpu":  # a share of a CPU that doesn't fit would leave it pending for ever, without a word
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        return {"num_cpus": 0, "runtime_env": {"env_vars": worker_environment(on) | environment | hidden}}
    slot, share = reward_place(index, models, slots.count)
    return slots.options(slot, share, environment)


def reward_device(setting: str, slots: str) -> str:
    """Where models and judges run, by reward.device and the slots' device: `cpu` or `cuda`.

    EngineError where GPUs are asked for and the slots have none.
    """
    if setting == "cuda" and slots != "cuda":
        raise EngineError("reward.device=cuda: the slots of this run are no GPUs; set reward.device=auto")
    return slots if setting == "auto" else setting


def reward_place(index: int, models: int, slots: int) -> tuple[int, float]:
    """(slot, share of it) of one of `models` reward models: from the last slot on, evenly over all of them.

    The shares of a slot's models add up to REWARD_SHARE at most, whose memory they have to leave one another.
    """
    return slots - 1 - index % slots, REWARD_SHARE / -(-models // slots)


def worker_environment(device: str) -> dict[str, str]:
    """Environment of every worker process."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = {"TORCH_EXTENSIONS_DIR": extensions} if extensions else {}
    return QUIET | (CPU_ENVIRONMENT if device == "cpu" else {}) | cache


async def start(config: Config, again: bool = False) -> Slots:
    """Start or join Ray and reserve the slots, spread over nodes as trainer.nnodes says; bounded by the time-out.

    `again`: the run has had its slots before, and waits for a lost node's successor as long as for any worker.
    """
    device = choose_device(config)
    os.environ.update({name: value for name, value in QUIET.items() if name.startswith("RAY_")})
    if device == "cpu":
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else DeepSpeed warns, in this process too, that it finds no GPU
    # The engine's own child processes end with it, also when it is killed.
    os.environ["RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"] = "true"  # noqa: SIM112
    # Ray's own is 15: beside two busy programs on two cores, an engine's start took minutes instead of seconds.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with own_sigterm():
        if config.cluster.ray_address is None:
            _need_shared_memory()
            _start_ray(config)
        else:
            _join_ray(config.cluster.ray_address)
    heed_children()
    patience = 10.0 if config.cluster.ray_address is None else min(JOINING_S, config.cluster.timeout_s)
    group, nodes = await _reserve(config, device, config.cluster.timeout_s if again else patience)
    return Slots(group, config.slots, device, _cores(config, device), nodes)


async def _reserve(config: Config, device: str, patience: float) -> tuple[PlacementGroup, tuple[Node, ...]]:
    bundle = {"slot": 1, "CPU": 0.01} | ({"GPU": 1} if device == "cuda" else {})
    until, per_node = time.monotonic() + patience, config.trainer.n_gpus_per_node
    while True:  # nodes may be joining
        if taken := choose(present(), config.trainer.nnodes, per_node, bundle, here()):
            selectors = [{"ray.io/node-id": node.id} for node in taken for _ in range(per_node)]
            group = placement_group([bundle] * config.slots, strategy="PACK", bundle_label_selector=selectors)
            if group.wait(PLACING_S):
                return group, tuple(taken)
            remove_placement_group(group)
        if time.monotonic() > until:
            raise _no_room(config, bundle)
        await asyncio.sleep(0.2)


def _no_room(config: Config, bundle: dict[str, float]) -> EngineError:
    free = [f"{node}: {', '.join(f'{node.free.get(name, 0):g} {name}' for name in bundle)}" for node in live()]
    return EngineError(
        f"Ray could not reserve trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} slots ({bundle} each) on "
        f"trainer.nnodes={config.trainer.nnodes} nodes. Free on the cluster's nodes: {'; '.join(free)}. Set both to "
        "what is there, or start the nodes with --resources='{\"slot\": N}'."
    )


def _cores(config: Config, device: str) -> tuple[int, ...] | None:
    if device != "cpu" or config.cluster.ray_address is not None or config.rollout.tensor_model_parallel_size > 1:
        return None
    if config.slots == 1:  # nothing to keep it apart from; its engine and its rank start twice as fast on two cores
        return None
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[: config.slots]) if len(cores) >= config.slots else None


def _start_ray(config: Config, attempts: int = 3) -> None:
    """A cluster of this run's own, which listens on loopback alone and asks for the user's token of Ray.

    Ray gives its helpers 15 s to start, too few on a laptop under load: try again.
    """
    for attempt in range(attempts):
        try:
            with _loopback():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    resources={"slot": config.slots},
                    num_cpus=max(os.cpu_count() or 1, config.slots),
                    _node_ip_address=LOOPBACK,
                )
            return
        except Exception as error:
            ray.shutdown()
            if attempt + 1 == attempts:
                raise EngineError(
                    f"Ray did not start on this machine in {attempts} attempts ({str(error).strip().splitlines()[0]}). "
                    "Its logs are in /tmp/ray/session_latest/logs; an overloaded machine or a full disk are usual."
                ) from error


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray puts the machine's address in the place of the loopback one, unless it is told to have one node only."""
    with mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


def _join_ray(address: str) -> None:
    try:
        environment = {"env_vars": watchdog.environment()}
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise EngineError(
            f"Ray could not join the cluster at cluster.ray_address={address} ({why}). Start it (ray start --head; on "
            "other nodes ray start --address=HEAD:6379), give its token (RAY_AUTH_TOKEN_PATH), or "
            "leave cluster.ray_address out for one node."
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
