"""The embedding caches of all nodes, as the driver sees them: one `EmbeddingCache` actor per node.

Role: used by `encoding`, which decides what is encoded where. An embedding that a node lacks and another has is
fetched, never encoded again: its bytes go from node to node through Ray's object transfer, not through the driver.
Invariants: every call is bounded by `timeout_s` and names the cache that did not answer. Nothing waits otherwise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfuse.cluster import remote
from rlfuse.samples import Embedding
from rlfuse.video.cache import EmbeddingCache


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Of every node's cache."""

    limit_bytes: int
    disk: str | None = None
    """Folder of the disk tier; for a frozen tower only."""
    disk_bytes: int | None = None
    """None: no limit."""
    root: str = "/dev/shm"


class EmbeddingStore:
    """Node names are those that `start` is given."""

    def __init__(self, settings: CacheSettings, timeout_s: float, environment: dict[str, str]):
        self.settings, self.timeout_s, self.environment = settings, timeout_s, environment
        self._caches: dict[str, Any] = {}
        self._homes: defaultdict[str, set[str]] = defaultdict(set)  # nodes that had the key when last heard of

    async def start(self, nodes: Mapping[str, str]) -> None:
        """A cache for each name, on that Ray node."""
        settings = self.settings
        for name, node in nodes.items():
            self._caches[name] = (
                ray.remote(EmbeddingCache)
                .options(
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    runtime_env={"env_vars": self.environment},
                )
                .remote(settings.limit_bytes, settings.disk, settings.disk_bytes, settings.root)
            )
        await self._all("counters")

    async def lookup(self, key: str, tokens: int, hidden: int, holder: str) -> Embedding | None:
        """The handle on some node that has the entry, held for `holder`; None if it has to be encoded."""
        known = sorted(self._homes[key])
        for node in [*known, *(node for node in self._caches if node not in known)]:
            if found := await self._ask(node, "lookup", key, tokens, hidden, holder):
                self._homes[key].add(node)
                return found
            self._homes[key].discard(node)
        return None

    async def reserve(self, node: str, key: str, tokens: int, hidden: int, holder: str) -> str:
        """Room on `node`; returns the file to write to."""
        return await self._ask(node, "reserve", key, tokens, hidden, holder)

    async def commit(self, node: str, key: str) -> Embedding:
        """The entry on `node` is written."""
        self._homes[key].add(node)
        return await self._ask(node, "commit", key)

    async def abandon(self, node: str, key: str) -> None:
        """Drop the entry on `node`."""
        self._homes[key].discard(node)
        await self._ask(node, "abandon", key)

    async def move(self, source: str, part: str, node: str, key: str, row: int) -> None:
        """Rows that were written to the entry `part` on `source` become rows of `key` on `node`; `part` is dropped."""
        data = self._caches[source].read.remote(part)
        await self._ask(node, "write", key, row, data)
        await self.abandon(source, part)

    async def fetch(self, embedding: Embedding, node: str, holder: str) -> Embedding:
        """The same embedding in the shared memory of `node`, held there for `holder`; copied if it isn't there yet."""
        key, size = embedding.key, (embedding.tokens, embedding.hidden)
        if found := await self._ask(node, "lookup", key, *size, holder):
            return found
        await self.reserve(node, key, *size, holder)
        try:
            source = next(iter(self._homes[key] - {node}))
            await self._ask(node, "write", key, 0, self._caches[source].read.remote(key))
        except BaseException:
            await self.abandon(node, key)
            raise
        return await self.commit(node, key)

    async def release(self, holder: str) -> None:
        """`holder` is done with all that it held, on all nodes."""
        await self._all("release", holder)

    async def counters(self) -> dict[str, int]:
        """Sums over the nodes, see `EmbeddingCache.counters`."""
        of_nodes = await self._all("counters")
        return {name: sum(node[name] for node in of_nodes) for name in of_nodes[0]}

    async def problems(self) -> list[str]:
        """What went wrong with disk tiers."""
        return [problem for problems in await self._all("problems") for problem in problems]

    async def close(self) -> None:
        """Remove all entries; the caches end."""
        try:
            await self._all("close")
        finally:
            for cache in self._caches.values():
                ray.kill(cache)
            self._caches.clear()

    async def _ask(self, node: str, method: str, *arguments: Any) -> Any:
        reference = getattr(self._caches[node], method).remote(*arguments)
        return await remote.call(reference, f"embedding cache of node {node}", method, self.timeout_s)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(self._ask(node, method, *arguments) for node in self._caches))
