"""Decode for encoder ranks: in their own pools, and on CPU nodes without slots.

    encoder rank --thread--> own pool, first while it is free
                 --thread--> node without slots: a pool for each of its processes --object store--> frames

What another node cannot decode, or does not answer in time, is decoded locally, and that node is not asked again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from queue import PriorityQueue, Queue
from threading import Lock
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfuse.cluster import remote, watchdog
from rlfuse.cluster.child_processes import restore_child_signals
from rlfuse.errors import EngineError, VideoError
from rlfuse.samples import FramePlan
from rlfuse.video.decode_pool import START_S, DecodePool

FrameReader = Callable[[str, FramePlan, int, int], np.ndarray]
"""(path, plan, first, last) -> uint8 [last - first, height, width, 3]: these of the plan's frames."""


class DecoderNode:
    """`processes` callers at a time are served, each for at most `timeout_s`."""

    def __init__(self, name: str, processes: int, timeout_s: float):
        restore_child_signals()  # decoders are children of this process
        watchdog.register(name)
        self._free: Queue[DecodePool] = Queue()
        for _ in range(processes):
            self._free.put(DecodePool(1, timeout_s))

    def ready(self) -> None:
        """Returns once the process stands."""

    def decode(self, path: str, plan: Any, first: int, last: int) -> np.ndarray | None:
        """These frames; None where they can't be had on this node."""
        if not os.path.exists(path):
            return None
        pool = self._free.get()
        try:
            return pool.decode(path, plan, first, last)
        except VideoError:
            return None
        finally:
            self._free.put(pool)


class DecoderNodes:
    """`nodes`: Ray's names of those without slots, and of each how many CPUs are taken, for a process each."""

    def __init__(self, nodes: Mapping[str, int], timeout_s: float, environment: dict[str, str]):
        self._nodes = {node: processes for node, processes in nodes.items() if processes > 0}
        self._timeout_s, self._environment = timeout_s, environment
        self._actors: dict[str, Any] = {}

    async def start(self) -> None:
        """An actor on each; a node where none stands within START_S is left out, as nothing depends on it."""
        await asyncio.gather(*map(self._start, self._nodes))

    async def _start(self, node: str) -> None:
        name, processes = f"decoders of node {node[:8]}", self._nodes[node]
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        environment = {"env_vars": self._environment}
        options = {"num_cpus": processes, "scheduling_strategy": where, "runtime_env": environment}
        actor = ray.remote(DecoderNode).options(max_concurrency=processes + 1, **options)
        started = actor.remote(name, processes, self._timeout_s)
        try:
            await remote.call(started.ready.remote(), name, "start", START_S)
            self._actors[node] = started
        except EngineError:
            ray.kill(started)

    def share(self, rank: int, ranks: int) -> list[Any]:
        everyone = [actor for node, actor in self._actors.items() for _ in range(self._nodes[node])]
        return everyone[rank::ranks]

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()


class Decoders:
    """Of one rank. `here` reads on this node; `elsewhere` is its `DecoderNodes.share`; `timeout_s`: a block there."""

    def __init__(self, here: FrameReader, elsewhere: Sequence[Any], timeout_s: float):
        self.count = 1 + len(elsewhere)
        self._here, self._elsewhere, self._timeout_s = here, elsewhere, timeout_s
        self._own_pool = Lock()
        self._free: PriorityQueue[int] = PriorityQueue()
        for number in range(self.count):  # 0: here
            self._free.put(number)

    def read(self, path: str, plan: FramePlan, first: int, last: int) -> tuple[np.ndarray, bool]:
        number = self._free.get()
        if number and (frames := self._from(number, path, plan, first, last)) is not None:
            return frames, True
        try:
            with self._own_pool:
                return self._here(path, plan, first, last), False
        finally:
            if not number:
                self._free.put(number)

    def _from(self, number: int, *block: Any) -> np.ndarray | None:
        try:
            found = ray.get(self._elsewhere[number - 1].decode.remote(*block), timeout=self._timeout_s)
        except RayError:
            return None
        self._free.put(number)
        return None if found is None else found.copy()  # out of the object store
