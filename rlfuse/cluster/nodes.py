"""Choose the nodes and the device of a run, and watch the nodes while it runs.

A node is lost if Ray reports it dead, or if its port does not answer LOOKS times: within 15 s. Ray alone takes up to
30 s.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

import ray
from ray._private.services import parse_address

from rlfuse.cluster.joining import request
from rlfuse.errors import NodeLost, WorkerLost

LOOK_S, ANSWER_S, LOOKS = 2.0, 3.0, 3
HEAD_S = 12.0
"""Time for the head to accept a connection again, as it may be restarting."""
MIN_ID_PREFIX = 8
JOB_ID_SUFFIX = 8
"""Length of a job's id, which is the suffix of the ids of its placement groups."""
SHOWN = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of the cluster."""

    id: str
    address: str
    port: int
    free: Mapping[str, float] = field(compare=False)
    total: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"

    def is_called(self, name: str) -> bool:
        return name == self.address or (len(name) >= MIN_ID_PREFIX and self.id.startswith(name))


def device_of(setting: str, nodes: Sequence[Node]) -> tuple[str, str]:
    """Return `cpu` or `cuda` by cluster.device and these nodes, and why; GPUs in use count too."""
    if setting != "auto":
        return setting, f"cluster.device={setting}"
    count = sum(node.total.get("GPU", 0) > 0 for node in nodes)
    found = f"cluster.device=auto, and {count} of {len(nodes)} Ray nodes have GPUs"
    return "cuda" if count else "cpu", found


def choose(
    nodes: Sequence[Node], count: int, slots: int, bundle: Mapping[str, float], driver: str, order: Sequence[str] = ()
) -> list[Node] | None:
    """Return `count` nodes with room for `slots` bundles each, preferring `order` and the driver's; None if too few."""
    roomy = [node for node in nodes if all(node.free.get(name, 0) >= slots * need for name, need in bundle.items())]
    places = {node: min((at for at, name in enumerate(order) if node.is_called(name)), default=inf) for node in roomy}
    ordered = sorted(
        roomy, key=lambda node: (places[node], node.id != driver, ipaddress.ip_address(node.address), node.id)
    )
    return ordered[:count] if len(ordered) >= count else None


def answering_nodes() -> list[Node]:
    """Return the nodes of the cluster that answer now."""
    return [node for node in alive_nodes() if answers(node)]


def alive_nodes() -> list[Node]:
    """Return the nodes of the cluster that Ray considers alive."""
    free = ray._private.state.available_resources_per_node()  # there is no public function
    return [
        Node(id, each["NodeManagerAddress"], each["NodeManagerPort"], free.get(id, {}), each["Resources"])
        for each in ray.nodes()
        if (id := each["NodeID"]) and each["Alive"]
    ]


def jobs_per_node() -> dict[str, list[str]]:
    """Return the other jobs with placement groups or actors on each node, by its id: a job's id, driver and command."""
    mine, state = ray.get_runtime_context().get_job_id(), ray._private.state.state
    held = {(each["Address"]["NodeID"], each["JobID"]) for each in state.actor_table(None, None, "ALIVE").values()}
    for id, group in state.placement_group_table().items():
        if group["state"] == "CREATED":
            held |= {(node, id[-JOB_ID_SUFFIX:]) for node in group["bundles_to_node_id"].values()}
    drivers = {
        each["JobID"]: f"process {each['DriverPid']} of {each['DriverIPAddress']}: "
        f"{' '.join(each['Entrypoint'].split())[:SHOWN]}"
        for each in state.job_table()
        if not each["IsDead"]
    }
    found: dict[str, list[str]] = {}
    for node, job in sorted(held):
        if job != mine:
            found.setdefault(node, []).append(f"job {job} ({drivers.get(job, 'its driver has ended')})")
    return found


def this_node_id() -> str:
    """Return the id of the driver's node."""
    return ray.get_runtime_context().get_node_id()


async def fail_on_lost_node(work: Coroutine[Any, Any, T], occupants: Mapping[Node, str]) -> T:
    """Return the result of `work`; NodeLost names a lost node and its `occupants`, WorkerLost the cluster's head."""
    away = [node for node in occupants if node.id != this_node_id()]
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_watch(away))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            gone, cause = watch.result(), None
        elif (cause := task.exception()) is None:
            return task.result()
        elif not (away and isinstance(cause, Exception) and (gone := await _lost(away))):
            raise cause  # otherwise the node loss made peers fail first
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    raise NodeLost(lost_message(gone, occupants), tuple(node.id for node in gone)) from cause


def lost_message(gone: Sequence[Node], occupants: Mapping[Node, str]) -> str:
    """Return the message of a node loss."""
    names = "; ".join(f"{node}, which ran {occupants[node]}" for node in gone)
    return (
        f"lost node {names}. Neither its processes nor its Ray services answer. Bring it back or add "
        "another, or rerun the command with fewer slots (trainer.nnodes, trainer.n_gpus_per_node) to resume with those."
    )


async def _watch(nodes: Sequence[Node]) -> list[Node]:
    missed = dict.fromkeys(nodes, 0)
    while True:
        await asyncio.sleep(LOOK_S)
        for node, reason in zip(nodes, await _look(nodes), strict=True):
            missed[node] = 0 if reason == "" else LOOKS if reason == "dead" else missed[node] + 1
        if gone := [node for node in nodes if missed[node] >= LOOKS]:
            return gone


async def _lost(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes that do not answer. Workers of a lost node may fail before its port does, so try repeatedly."""
    for look in range(LOOKS):
        await asyncio.sleep(min(look, 1))
        if gone := [node for node, reason in zip(nodes, await _look(nodes), strict=True) if reason]:
            return gone
    return []


async def _look(nodes: Sequence[Node]) -> list[str]:
    """Return for each node `` (alive), `silent` (port does not answer), or `dead` (reported by Ray)."""
    alive = {each["NodeID"] for each in await from_head(ray.nodes) if each["Alive"]}
    answered = await asyncio.gather(*(asyncio.to_thread(answers, node) for node in nodes))
    return [
        "dead" if node.id not in alive else "" if answer else "silent"
        for node, answer in zip(nodes, answered, strict=True)
    ]


def answers(node: Node) -> bool:
    """Return whether the node accepts connections at its port."""
    return not _refusal(node.address, node.port)


async def from_head(function: Callable[[], T]) -> T:
    """Call Ray's head; WorkerLost if it is gone, since Ray would wait and then end this process."""
    address, until = ray.get_runtime_context().gcs_address, time.monotonic() + HEAD_S
    while why := await asyncio.to_thread(_refusal, *parse_address(address)):
        if time.monotonic() > until:
            raise WorkerLost(f"lost the head of the Ray cluster at {address}: it does not accept connections ({why}).")
        await asyncio.sleep(LOOK_S)
    return await asyncio.wrap_future(request(function))


def _refusal(address: str, port: int | str) -> str:
    try:
        socket.create_connection((address, port), ANSWER_S).close()
    except OSError as error:
        return str(error)
    return ""
