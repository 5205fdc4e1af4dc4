r"""Keep buckets of weights in the shared memory of each node, for the engines there.

    trainer rank --file--> its staging --read, one put--> object store --one copy a node--> staging --file--> engines
                              \--file--> engines of that node

`WeightStaging` is one node's folder: in the driver for its own node, a Ray actor elsewhere. A bucket is complete before
its path is passed on; `close` leaves nothing behind. Every call is bounded by cluster.timeout_s.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rlfuse.cluster import nodes, scratch
from rlfuse.cluster.placement import Slots
from rlfuse.cluster.remote import call, on_node
from rlfuse.cluster.scratch import SHARED_MEMORY
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.errors import EngineError


class WeightStaging:
    """Staging folder below `root`, which exists during a push."""

    def __init__(self, root: Path = SHARED_MEMORY):
        self.root = root

    def open(self) -> str:
        self.folder, self._lock = scratch.make(scratch.WEIGHTS, self.root)
        return str(self.folder)

    def free(self) -> int:
        return shutil.disk_usage(self.root).free

    def size(self, path: str) -> int:
        return Path(path).stat().st_size

    def read(self, path: str) -> np.ndarray:
        """Return a bucket's file as uint8."""
        return np.asarray(np.memmap(path, np.uint8, "r"))

    def write(self, path: str, bucket: np.ndarray) -> None:
        with open(path, "wb") as file:
            file.write(bucket)

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def remove(self, path: str) -> None:
        Path(path).unlink()

    def close(self) -> None:
        scratch.remove(self.folder)
        self._lock.close()


class StagingHandle:
    """Driver-side handle of a node's staging, engines and slots. `node`: None for the driver's process."""

    def __init__(
        self,
        engines: Sequence[Any],
        staging: Any,
        node: nodes.Node | None = None,
        slots: range = range(0),
        timeout_s: float = 60.0,
    ):
        self.engines, self.slots, self._staging, self._timeout_s = list(engines), slots, staging, timeout_s
        self._node, self._folder = node, ""

    @property
    def location(self) -> str:
        return f"{SHARED_MEMORY} of node {self._node}" if self._node else str(self._staging.root)

    def path(self, index: int) -> str:
        return f"{self._folder}/{index}.safetensors"

    async def open(self) -> None:
        self._folder = await self.ask("open")

    async def ask(self, method: str, *arguments: Any) -> Any:
        if self._node is None:
            return await asyncio.to_thread(getattr(self._staging, method), *arguments)
        reference, name = getattr(self._staging, method).remote(*arguments), f"weights on node {self._node}"
        return await call(reference, name, f"do `{method}` in shared memory", self._timeout_s)

    async def need(self, path: Path | str, key: str) -> None:
        """Raise EngineError with `key` unless the node sees `path`."""
        if not await self.ask("exists", str(path)):
            raise EngineError(
                f"{path} does not exist on node {self._node}. Put {key} on storage that all nodes share, at the same "
                "path"
            )

    def share(self, index: int) -> ray.ObjectRef:
        return self._staging.read.remote(self.path(index))


def stagings(engines: Sequence[Any], slots: Slots, timeout_s: float) -> list[StagingHandle]:
    """Return a staging for each node. `engines`: in slot order."""
    if [node.id for node in slots.nodes] == [nodes.this_node_id()]:
        return [StagingHandle(engines, WeightStaging())]
    environment = worker_environment(slots.device)
    found, per_node, local = [], len(engines) // len(slots.nodes), slots.count // len(slots.nodes)
    for i, node in enumerate(slots.nodes):
        staging = on_node(WeightStaging, node.id, environment).remote()
        mine, its_slots = engines[i * per_node : (i + 1) * per_node], range(i * local, (i + 1) * local)
        found.append(StagingHandle(mine, staging, node, its_slots, timeout_s))
    return found
