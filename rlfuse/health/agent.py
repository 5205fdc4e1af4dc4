"""Agents that sample a node and the run's processes on it once a second, using at most SHARE of a core."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Any

from rlfuse.cluster.nodes import Node, this_node_id
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import call, on_node
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.health.sampling import Sampler
from rlfuse.health.series import Sample

PERIOD_S = 1.0
SHARE = 0.01  # average share of a core
KEPT = 200_000  # maximum buffered samples: of 100 workers over half an hour
DRAIN_S = 5.0


class Agent:
    """Samples a node in a background thread until closed."""

    def __init__(self, node: str, probe: tuple[str, int] | None = None, sampler: Sampler | None = None):
        self._sampler = sampler or Sampler(node, probe)
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._ended, self._failure = threading.Event(), ""
        self._thread = threading.Thread(target=self._sample_loop, daemon=True, name="health")
        self._thread.start()

    def drain(self) -> tuple[list[Sample], str]:
        failure, self._failure = self._failure, ""
        return [self._samples.popleft() for _ in range(len(self._samples))], failure

    def close(self) -> None:
        self._ended.set()
        self._thread.join(PERIOD_S)

    def _sample_loop(self) -> None:
        took = 0.0
        while not self._ended.wait(max(PERIOD_S, took / SHARE)):
            began = time.thread_time()
            try:
                self._samples.extend(self._sampler.sample())
            except Exception as error:  # unexpected values of a kernel or driver must not end the run
                self._failure = f"{type(error).__name__}: {error}"
            # Process trees are refreshed only every few samples, so the cost is averaged.
            took += 0.2 * (time.thread_time() - began - took)


class AgentHandle:
    """The driver's side of an agent."""

    def __init__(self, node: str, agent: Any, remote: bool):
        self.node, self._agent, self._remote = node, agent, remote

    async def drain(self) -> tuple[list[Sample], str]:
        if not self._remote:
            return self._agent.drain()
        try:
            return await call(self._agent.drain.remote(), f"the agent of {self.node}", "return its samples", DRAIN_S)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return [], str(error).partition("\n")[0]

    def close(self) -> None:
        if not self._remote:
            self._agent.close()


def agents(slots: Slots) -> list[AgentHandle]:
    """Return an agent per machine of the run. All except the first also measure the round trip to the first node."""
    first, found = slots.nodes[0], {}
    for node in slots.nodes:
        if node.address not in found:  # nodes of the same machine share an agent
            found[node.address] = _agent(node, None if node is first else (first.address, first.port), slots.device)
    return list(found.values())


def _agent(node: Node, probe: tuple[str, int] | None, device: str) -> AgentHandle:
    name = f"node/{node.address}"
    if node.id == this_node_id():
        return AgentHandle(name, Agent(name, probe), remote=False)
    agent = on_node(Agent, node.id, worker_environment(device)).remote(name, probe)
    return AgentHandle(name, agent, remote=True)
