"""The embedding caches of all nodes as seen by the driver, one `EmbeddingCache` actor per node.

Embeddings are copied between nodes through Ray's object store, at most COPYING at a time. Calls are bounded in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfuse.cluster import remote
from rlfuse.samples import Embedding
from rlfuse.video.cache import EmbeddingCache

COPYING = 2


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Of every node's cache."""

    limit_bytes: int
    disk: str | None = None
    disk_bytes: int | None = None
    root: str = "/dev/shm"


class EmbeddingStore:
    """Node names are those that `start` is given."""

    def __init__(self, settings: CacheSettings, timeout_s: float, environment: dict[str, str]):
        self.settings, self.timeout_s, self.environment = settings, timeout_s, environment
        self._caches: dict[str, Any] = {}
        self._copying = asyncio.Semaphore(COPYING)

    async def start(self, nodes: Mapping[str, str]) -> None:
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
        """The handle of what nodes have of the entry, held there for `holder`; None if it has to be encoded."""
        found = [copy for copy in await self._all("lookup", key, tokens, hidden, holder) if copy]
        return _joined(found) if found else None

    async def has(self, key: str) -> bool:
        return any(await self._all("has", key))

    async def reserve(self, node: str, key: str, tokens: int, hidden: int, holder: str) -> str:
        return await self._ask(node, "reserve", key, tokens, hidden, holder)

    async def commit(self, node: str, key: str) -> Embedding:
        return await self._ask(node, "commit", key)

    async def abandon(self, node: str, key: str) -> None:
        await self._ask(node, "abandon", key)

    async def move(self, source: str, part: str, node: str, key: str, row: int) -> None:
        """Rows that were written to the entry `part` on `source` become rows of `key` on `node`; `part` is dropped."""
        data = self._caches[source].read.remote(part)
        await self._ask(node, "write", key, row, data)
        await self.abandon(source, part)

    async def spread(self, key: str, tokens: int, hidden: int, holder: str) -> Embedding:
        """The handle of an entry that some node has, once all have it, held for `holder`; EngineError without room."""
        entry = (key, tokens, hidden, holder)
        found = dict(zip(self._caches, await self._all("lookup", *entry), strict=True))
        if lacking := [node for node, copy in found.items() if copy is None]:
            source = next(node for node, copy in found.items() if copy)
            async with self._copying:
                data = self._caches[source].read.remote(key)  # into the object store once, however many nodes take it
                copies = await asyncio.gather(*(self._copy(data, node, *entry) for node in lacking))
            found |= zip(lacking, copies, strict=True)
        return _joined(list(found.values()))

    async def _copy(self, data: Any, node: str, key: str, tokens: int, hidden: int, holder: str) -> Embedding:
        await self.reserve(node, key, tokens, hidden, holder)
        try:
            await self._ask(node, "write", key, 0, data)
        except BaseException:
            await self.abandon(node, key)
            raise
        return await self.commit(node, key)

    async def release(self, holder: str) -> None:
        await self._all("release", holder)

    async def counters(self) -> dict[str, int]:
        of_nodes = await self._all("counters")
        return {name: sum(node[name] for node in of_nodes) for name in of_nodes[0]}

    async def problems(self) -> list[str]:
        return [problem for problems in await self._all("problems") for problem in problems]

    async def close(self) -> None:
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


def _joined(copies: Sequence[Embedding]) -> Embedding:
    first, *others = copies
    return replace(first, copies=tuple(copy.path for copy in others))
