"""Start Ray for one run: the cluster, one placement bundle per slot, and actors on slots.

A slot is one device: on GPUs trainer rank and engine share it. Actors request a custom resource of their bundle and no
CPU, since a fractional CPU that does not fit would wait forever.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlfuse.cluster import cuda, fork_server, forked_worker, scratch, watchdog
from rlfuse.cluster.child_processes import preserve_sigterm, restore_child_signals
from rlfuse.cluster.joining import join_ray, protected_token, without_error_pages, without_path_shadowing
from rlfuse.cluster.nodes import (
    Node,
    alive_nodes,
    answering_nodes,
    choose,
    device_of,
    from_head,
    jobs_per_node,
    this_node_id,
)
from rlfuse.cluster.worker_environment import QUIET, clear_launcher_variables, job_environment, worker_environment
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError

LOOPBACK = "127.0.0.1"
STARTING_S = 10.0
JOINING_S = 60.0
PLACING_S = 5.0
FIRST_NOTICE_S, NOTICE_S = 5.0, 60.0
"""Time until a wait for slots is reported, and between further reports."""
START_ATTEMPTS = 3
SESSIONS = "ray"
"""Ray's own folder, which it opens to all users, inside the private one of this process."""
NEEDED_SHARED_MIB = 256


@dataclass(frozen=True, slots=True)
class Slots:
    """The reserved devices of a run."""

    group: PlacementGroup
    count: int
    device: str
    cores: tuple[int, ...] | None = None
    """On a CPU host with enough cores: the core of each slot, to which its engine and its rank are bound."""
    nodes: tuple[Node, ...] = ()
    summary: str = ""

    @property
    def threads(self) -> int:
        """Return the CPU cores per slot of the smallest node."""
        cores = min((node.total.get("CPU", 1) for node in self.nodes), default=1)
        return max(1, int(cores * len(self.nodes) / self.count))

    def occupants(self, engine_width: int = 0) -> dict[Node, str]:
        per_node, found = self.count // len(self.nodes), {}
        for first, node in zip(range(0, self.count, per_node), self.nodes, strict=True):
            slots = range(first, first + per_node)
            engines = [f"rollout/{slot // engine_width}" for slot in slots[::engine_width]] if engine_width else []
            found[node] = ", ".join((*engines, *(f"trainer/{slot}" for slot in slots)))
        return found

    def engine_options(self, slot: int, width: int, environment: dict[str, str]) -> dict:
        """Return actor options of an engine over `width` slots; on GPUs the actor hosts only the front end."""
        if self.device == "cuda" and width > 1:
            if self.nodes and self.nodes[0].address == LOOPBACK:  # otherwise it uses the machine's address and hangs
                environment = environment | {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
            return self.options(slot, cuda.SHARE, environment, num_gpus=0, resources={})
        return self.options(slot, cuda.SHARE, environment)

    def options(self, slot: int, share: float, environment: dict[str, str] | None = None, **more: Any) -> dict:
        """Return the options of an actor on `slot` that takes `share` of its device."""
        return {
            "num_cpus": 0,
            "num_gpus": share if self.device == "cuda" else 0,
            "resources": {"slot": share},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, slot),
            "runtime_env": {"env_vars": worker_environment(self.device) | (environment or {})},
        } | more


def reward_options(index: int, models: int, slots: Slots | None, on: str, environment: dict[str, str]) -> dict:
    """Return actor options of a reward model or judge, `on` cpu or cuda (GPUs not run yet)."""
    if on == "cpu":  # a CPU share that does not fit would leave it pending forever, silently
        return {"num_cpus": 0, "runtime_env": {"env_vars": worker_environment(on) | environment}}
    slot, share = cuda.reward_place(index, models, slots.count)
    return slots.options(slot, share, environment)


def reward_device(setting: str, slots: str) -> str:
    """Return where models and judges run; EngineError if GPUs are requested and slots have none."""
    if setting == "cuda" and slots != "cuda":
        raise EngineError("reward.device=cuda: this run has no GPUs; set reward.device=auto")
    return slots if setting == "auto" else setting


async def start(
    config: Config, worker_imports: str | None = None, again: bool = False, without: Collection[str] = ()
) -> Slots:
    """Start or join Ray and reserve the slots within the timeout.

    worker_imports: module with the imports of workers on this host's CPUs, run once in the fork server. again: restart
    after a loss. without: ids of nodes that are about to leave.
    """
    clear_launcher_variables()
    os.environ.update({name: value for name, value in QUIET.items() if name.startswith("RAY_")})
    # Ray's default is 15: with two busy programs on two cores, engines took minutes instead of seconds to start.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault(
        "RAY_worker_register_timeout_seconds", "600"
    )  # default 60: imports from network storage can be slow
    with preserve_sigterm():
        if config.cluster.ray_address is None:
            for kind in scratch.KINDS:
                scratch.sweep(kind)
            _need_shared_memory()
            _start_ray(config, worker_imports)
        else:
            join_ray(config.cluster.ray_address)
    restore_child_signals()
    return await _reserve(config, again, without)


async def _reserve(config: Config, again: bool, without: Collection[str]) -> Slots:
    needed = () if again else config.cluster.node_order  # a replacement node has another name
    began, per_node, order = time.monotonic(), config.trainer.n_gpus_per_node, config.cluster.node_order
    notice = FIRST_NOTICE_S
    while True:  # nodes may be joining
        found = [node for node in await from_head(answering_nodes) if node.id not in without]
        device, why = device_of(config.cluster.device, found)
        bundle = _bundle(device)
        absent = [name for name in needed if not any(node.is_called(name) for node in found)]
        taken = None if absent else choose(found, config.trainer.nnodes, per_node, bundle, this_node_id(), order)
        if taken and (group := await from_head(partial(_place, taken, per_node, bundle))):
            summary = f"{'GPUs' if device == 'cuda' else 'CPUs'} of {', '.join(map(str, taken))}: {why}"
            return Slots(group, config.slots, device, _cores(config, device), tuple(taken), summary)
        waited, nodes = time.monotonic() - began, await from_head(alive_nodes)
        limit = _patience(config, again, not absent and _have_enough(nodes, config, bundle))
        if waited > limit and absent:
            raise EngineError(
                f"cluster.node_order: no node is called {', '.join(absent)}; Ray nodes: {', '.join(map(str, found))}. "
                "Correct or remove the names."
            )
        if waited > limit:
            raise EngineError(no_slots_message(config, bundle, nodes, why, await from_head(jobs_per_node), again))
        if waited > notice:
            notice = waited + NOTICE_S
            lacking = f"nodes called {', '.join(absent)} (cluster.node_order)"
            lacking = lacking if absent else shortage(config, bundle, nodes, why, await from_head(jobs_per_node))
            watchdog.say(f"Waited {waited:.0f} of at most {limit:g} s for {lacking}")
        await asyncio.sleep(0.2)


def _place(nodes: Sequence[Node], per_node: int, bundle: Mapping[str, float]) -> PlacementGroup | None:
    selectors = [{"ray.io/node-id": node.id} for node in nodes for _ in range(per_node)]
    group = placement_group([dict(bundle)] * len(selectors), strategy="PACK", bundle_label_selector=selectors)
    if group.wait(PLACING_S):
        return group
    remove_placement_group(group)
    return None


def _patience(config: Config, again: bool, exist: bool) -> float:
    limit = config.cluster.timeout_s
    if config.cluster.ray_address is None:
        return limit if again else STARTING_S
    return limit if again or exist else min(JOINING_S, limit)


def _have_enough(nodes: Sequence[Node], config: Config, bundle: Mapping[str, float]) -> bool:
    idle = [replace(node, free=node.total) for node in nodes]
    return choose(idle, config.trainer.nnodes, config.trainer.n_gpus_per_node, bundle, "") is not None


def _bundle(device: str) -> dict[str, float]:
    return {"slot": 1, "CPU": 0.01} | ({"GPU": 1} if device == "cuda" else {})


def spare_nodes(slots: Slots) -> list[Node]:
    """Return nodes outside the run that have room for as many slots as each node of the run."""
    others = [node for node in answering_nodes() if node not in slots.nodes]
    per_node, bundle, one = slots.count // len(slots.nodes), _bundle(slots.device), this_node_id()
    return [node for node in others if choose([node], 1, per_node, bundle, one)]


def shortage(
    config: Config, bundle: Mapping[str, float], nodes: Sequence[Node], why: str, held: Mapping[str, Sequence[str]]
) -> str:
    """Describe needed and free slots on `nodes`, and the jobs that hold the others (`held`)."""
    free = []
    for node in nodes:
        counts = [f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}" for name in bundle]
        jobs = f", held by {' and '.join(held[node.id])}" if node.id in held else ""
        free.append(f"{node}: {', '.join(counts)}{jobs}")
    trainer = config.trainer
    return (
        f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} slots ({dict(bundle)} each) on "
        f"trainer.nnodes={trainer.nnodes} nodes ({why}). Free on the cluster's nodes: {'; '.join(free)}."
    )


def no_slots_message(
    config: Config,
    bundle: Mapping[str, float],
    nodes: Sequence[Node],
    why: str,
    held: Mapping[str, Sequence[str]],
    again: bool = False,
) -> str:
    """Return the message of a run that got no slots in time. `again`: it had slots before a loss."""
    fewer = "" if again else "Reduce both to the available slots, or "
    remedy = f"{fewer}start the nodes with --resources='{{\"slot\": N}}'."
    if config.cluster.ray_address is not None and _have_enough(nodes, config, bundle):
        remedy = "Other jobs hold them: wait longer (cluster.timeout_s), or stop these jobs."
    elif "GPU" in bundle and config.cluster.ray_address is None:
        remedy = (
            f"{fewer}run on CPUs (cluster.device=cpu): torch {version('torch')} sees {_gpus()} GPUs on this machine."
        )
    elif "GPU" in bundle:
        remedy = (
            f"{fewer}start the nodes with --num-gpus=N --resources='{{\"slot\": N}}', or run on CPUs "
            "(cluster.device=cpu)."
        )
    return f"Ray could not reserve {shortage(config, bundle, nodes, why, held)} {remedy[0].upper()}{remedy[1:]}"


def _cores(config: Config, device: str) -> tuple[int, ...] | None:
    if device != "cpu" or config.cluster.ray_address is not None or config.rollout.tensor_model_parallel_size > 1:
        return None
    if config.slots == 1:  # a single slot needs no binding, and starts 2x faster on two cores
        return None
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[: config.slots]) if len(cores) >= config.slots else None


def _start_ray(config: Config, worker_imports: str | None) -> None:
    """Start a private cluster on loopback, with a token.

    Retried, since the 15 s that Ray allows its processes to start can be too short under load.
    """
    folder = str(scratch.of_this_process())
    _have_token()
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with (
                _loopback(),
                _free_agent_port(),
                without_error_pages(),
                without_path_shadowing(),
                _without_unused_processes(),
                _forked_workers(config, worker_imports),
                mock.patch.dict(os.environ, TMPDIR=folder),
            ):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    resources={"slot": config.slots},
                    num_cpus=max(os.cpu_count() or 1, config.slots),
                    num_gpus=_gpus(),
                    _node_ip_address=LOOPBACK,
                    _temp_dir=f"{folder}/{SESSIONS}",
                    runtime_env=job_environment(),
                )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                why = str(error).strip().splitlines()[0]
                cause = "Usual causes are an overloaded machine and a full disk."
                if isinstance(error, PermissionError):
                    cause = "Set HOME, TMPDIR and RAY_TMPDIR to folders that this user can write."
                raise EngineError(
                    f"Ray did not start on this machine in {START_ATTEMPTS} attempts ({why}). "
                    f"Its logs are in logs/session_* of the run folder. {cause}"
                ) from error


def _have_token() -> None:
    """Create a token if there is none: Ray would write it to a file with umask permissions."""
    if not any(map(os.environ.get, ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))) and protected_token() is None:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _gpus() -> int:
    """Return the number of GPUs that torch can use: a driver alone is not enough."""
    import torch  # imported here, since weight staging on nodes starts much faster without it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _loopback() -> AbstractContextManager:
    """Limit Ray to one node, since it would replace the loopback address otherwise."""
    return mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)


def _free_agent_port() -> AbstractContextManager:
    """Let Ray's agent listen on any free port: its fixed one is for a cluster that `ray start` may create."""
    parameters = partial(ray._private.parameter.RayParams, dashboard_agent_listen_port=0)
    return mock.patch.object(ray._private.parameter, "RayParams", parameters)


def _forked_workers(config: Config, imports: str | None) -> AbstractContextManager:
    if imports is None or config.cluster.device == "cuda" or _gpus():
        return nullcontext()
    fork_server.start(imports)
    return mock.patch.object(ray_constants, "SETUP_WORKER_FILENAME", forked_worker.__file__)


def _without_unused_processes() -> AbstractContextManager:
    """Start Ray without dashboard server, log monitor and autoscaler."""
    unasked = ("start_api_server", "start_log_monitor", "start_monitor")
    return mock.patch.multiple(ray._private.node.Node, **{name: lambda *_, **__: None for name in unasked})


def stop(logs: Path | None = None) -> None:
    """Disconnect from Ray; a cluster started by `start` is stopped. `logs`: target of Ray's logs of a failed run."""
    ray.shutdown()
    for session in (scratch.of_this_process() / SESSIONS).glob("session_*_*"):
        if logs is not None and not (logs / session.name).exists():
            with suppress(OSError):  # a failed copy must not hide the original error
                shutil.copytree(session / "logs", logs / session.name)
        shutil.rmtree(session, ignore_errors=True)


def shared_memory_speed() -> float:
    """Measure the bytes per second through /dev/shm, written once and read once."""
    block, began = bytes(16 << 20), time.perf_counter()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(block)
        file.seek(0)
        file.read()
    return len(block) / (time.perf_counter() - began)


def _need_shared_memory() -> None:
    free = shutil.disk_usage("/dev/shm").free >> 20
    if free < NEEDED_SHARED_MIB:
        raise EngineError(
            f"/dev/shm has {free} MiB free, but Ray and the weight sync need {NEEDED_SHARED_MIB} MiB. Remove leftover "
            "files (rlfuse runs clean), or enlarge it (docker run --shm-size=2g, mount -o "
            "remount,size=2g /dev/shm)."
        )
