"""Cache clip embeddings in the shared memory of each node, one bf16 copy each.

Rows are written directly into the file that `reserve` returns and `commit` renames, so readers see complete entries
only. Entries without a holder are evicted, least recently used first, before `limit_bytes` is exceeded. With a disk
tier, embeddings of a frozen tower are kept for later runs, which may share the folder; disk errors never stop a run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfuse.cluster import remote, scratch
from rlfuse.errors import EngineError
from rlfuse.samples import Embedding
from rlfuse.video.embedding import BF16, write_bytes

MIB = 1 << 20


@dataclass(slots=True)
class _Entry:
    tokens: int
    hidden: int
    whole: bool = False
    holders: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return self.tokens * self.hidden * BF16


class EmbeddingCache:
    """Cache of one node. A `holder` is the name of a user of entries, such as a step; held entries are not evicted."""

    def __init__(
        self, limit_bytes: int, disk: str | None = None, disk_bytes: int | None = None, root: str = "/dev/shm"
    ):
        self.limit_bytes = limit_bytes
        self.disk = DiskTier(disk, disk_bytes) if disk else None
        self.folder, self._lock = scratch.make(scratch.EMBEDDINGS, Path(root))
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._counts: Counter[str] = Counter()

    def lookup(self, key: str, tokens: int, hidden: int, holder: str) -> Embedding | None:
        """Return the entry from memory or the disk tier, held for `holder`; None if it is missing."""
        entry = self._entries.get(key)
        if entry is None and self.disk and self.disk.has(key):
            path = self.reserve(key, tokens, hidden, holder)
            if self.disk.load(key, self._entries[key].bytes, path):
                self._counts["disk_hits"] += 1
                return self._publish(key)
            self.abandon(key)
        if entry is None or not entry.whole:
            return None
        entry.holders.add(holder)
        self._entries.move_to_end(key)
        return self._handle(key)

    def has(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry.whole if entry else self.disk is not None and self.disk.has(key)

    def reserve(self, key: str, tokens: int, hidden: int, holder: str) -> str:
        """Allocate the memory of a new entry; return the file to write to. EngineError if there is no room."""
        if key in self._entries:
            raise EngineError(f"embedding {key} is already in the cache or being written; call lookup first")
        entry = _Entry(tokens, hidden, holders={holder})
        self._make_room(entry.bytes)
        path = self._partial(key)
        try:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, entry.bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise EngineError(
                f"{self.folder.parent} has no space for an embedding of {entry.bytes / MIB:.1f} MiB, although the "
                f"cache limit is {self.limit_bytes / MIB:.0f} MiB ({error}): lower the cache limit or enlarge "
                f"{self.folder.parent} (docker: --shm-size)"
            ) from error
        self._entries[key] = entry
        return str(path)

    def commit(self, key: str) -> Embedding:
        handle = self._publish(key)
        if self.disk:
            self.disk.save(key, handle.path)
        return handle

    def abandon(self, key: str) -> None:
        if self._entries.pop(key, None):
            self._partial(key).unlink(missing_ok=True)
            self._file(key).unlink(missing_ok=True)

    def release(self, holder: str) -> None:
        for entry in self._entries.values():
            entry.holders.discard(holder)

    def read(self, key: str) -> np.ndarray:
        """Return the bytes of an entry, complete or not, for another node."""
        file = self._file(key) if self._entries[key].whole else self._partial(key)
        return np.asarray(np.memmap(file, np.uint8, "r"))

    def write(self, key: str, first: int, data: np.ndarray) -> None:
        """Write bytes from another node at row `first` of a reserved entry."""
        self._counts["received_bytes"] += len(data)
        write_bytes(str(self._partial(key)), first * self._entries[key].hidden * BF16, data)

    def counters(self) -> dict[str, int]:
        """Return total evictions, disk hits, disk failures and received bytes, and current bytes (all, held)."""
        return {
            "evicted": self._counts["evicted"],
            "disk_hits": self._counts["disk_hits"],
            "disk_failures": self.disk.failures if self.disk else 0,
            "received_bytes": self._counts["received_bytes"],
            "bytes": self._bytes(),
            "held_bytes": sum(entry.bytes for entry in self._entries.values() if entry.holders),
        }

    def problems(self) -> list[str]:
        return list(self.disk.problems) if self.disk else []

    def close(self) -> None:
        """Finish writing to disk and remove the folder; handles become invalid."""
        if self.disk:
            self.disk.close()
        scratch.remove(self.folder)
        self._lock.close()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.bf16"

    def _partial(self, key: str) -> Path:
        return self.folder / f"{key}.partial"

    def _handle(self, key: str) -> Embedding:
        entry = self._entries[key]
        return Embedding(key, str(self._file(key)), entry.tokens, entry.hidden)

    def _publish(self, key: str) -> Embedding:
        os.rename(self._partial(key), self._file(key))
        self._entries[key].whole = True
        self._entries.move_to_end(key)
        return self._handle(key)

    def _bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def _make_room(self, needed: int) -> None:
        idle = [key for key, entry in self._entries.items() if entry.whole and not entry.holders]
        while self._bytes() + needed > self.limit_bytes and idle:
            if self.disk:
                self.disk.finish(idle[0])
            self.abandon(idle.pop(0))
            self._counts["evicted"] += 1
        if (used := self._bytes()) + needed > self.limit_bytes:
            holders = sorted({holder for entry in self._entries.values() for holder in entry.holders})
            raise EngineError(
                f"the embedding cache is full: {used / MIB:.1f} MiB in use (held by {', '.join(holders) or 'none'}), "
                f"{needed / MIB:.1f} MiB more are needed, the limit is {self.limit_bytes / MIB:.1f} MiB per node. "
                "Raise the limit, use fewer videos per step or fewer tokens per video, or release finished steps."
            )


WAIT_S = 60.0


class DiskTier:
    """On-disk copies of embeddings, written in a background thread."""

    def __init__(self, folder: str, limit_bytes: int | None):
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failures = 0
        self.problems: list[str] = []
        self._writer = ThreadPoolExecutor(1, "disk-tier")
        self._saving: dict[str, Future] = {}

    def has(self, key: str) -> bool:
        return self._file(key).exists()

    def load(self, key: str, size: int, target: str) -> bool:
        """Copy an entry to the file `target` of `size` bytes; return False if it is missing or incomplete."""
        try:
            os.utime(self._file(key))  # for eviction by least recent use
            data = np.memmap(self._file(key), np.uint8, "r")
            if len(data) != size:
                raise OSError(f"it has {len(data)} bytes instead of {size}")
            write_bytes(target, 0, data)
            return True
        except (OSError, ValueError) as error:  # evicted by another run, truncated by a host crash, or empty
            self._problem(f"{self._file(key)} could not be read: {error}")
            return False

    def save(self, key: str, source: str) -> None:
        """Copy the file `source` in the background; it must exist until `finish(key)`."""
        self._saving[key] = self._writer.submit(self._copy, key, source)

    def finish(self, key: str) -> None:
        """Wait for a pending write of `key`, at most WAIT_S."""
        if saving := self._saving.get(key):
            wait([saving], WAIT_S)

    def close(self) -> None:
        self._writer.shutdown()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.bf16"

    def _copy(self, key: str, source: str) -> None:
        partial = self.folder / f"{key}.{os.getpid()}.partial"
        try:
            shutil.copyfile(source, partial)
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.rename(partial, self._file(key))
            self._trim()
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._problem(f"embedding {key} could not be saved to {self.folder}: {error}")
        finally:
            self._saving.pop(key, None)

    def _trim(self) -> None:
        if self.limit_bytes is None:
            return
        found = [(file.stat(), file) for file in self.folder.iterdir()]
        excess = sum(status.st_size for status, _ in found) - self.limit_bytes
        for status, file in sorted(found, key=lambda pair: pair[0].st_mtime):
            if excess <= 0:
                return
            file.unlink(missing_ok=True)
            excess -= status.st_size

    def _problem(self, message: str) -> None:
        self.failures += 1
        self.problems.append(message)


MAX_CONCURRENT_COPIES = 2


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of the cache on each node."""

    limit_bytes: int
    disk: str | None = None
    disk_bytes: int | None = None
    root: str = "/dev/shm"


class EmbeddingStore:
    """Driver's view of the caches of all nodes, by the node names passed to `start`."""

    def __init__(self, settings: CacheSettings, timeout_s: float, environment: dict[str, str]):
        self.settings, self.timeout_s, self.environment = settings, timeout_s, environment
        self._caches: dict[str, Any] = {}
        self._copying = asyncio.Semaphore(MAX_CONCURRENT_COPIES)

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
        """Return a handle of the entry's copies, held for `holder`; None if no node has it."""
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
        """Copy the rows of entry `part` on `source` into entry `key` on `node`, from `row` on; drop `part`."""
        data = self._caches[source].read.remote(part)
        await self._ask(node, "write", key, row, data)
        await self.abandon(source, part)

    async def replicate(self, key: str, tokens: int, hidden: int, holder: str) -> Embedding:
        """Copy an entry to all nodes, held for `holder`, and return its handle. EngineError if a cache is full."""
        entry = (key, tokens, hidden, holder)
        found = dict(zip(self._caches, await self._all("lookup", *entry), strict=True))
        if lacking := [node for node, copy in found.items() if copy is None]:
            source = next(node for node, copy in found.items() if copy)
            async with self._copying:
                data = self._caches[source].read.remote(key)  # one object for all receiving nodes
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
