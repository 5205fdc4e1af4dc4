"""KV caches that may leave an engine with their samples: names, requests for them, and when they become invalid.

A folder in /dev/shm, kept by the engine's `RolloutWorker`; the connectors in vLLM's processes know its files by name.
Waits, for a limited time, for what is being written or read.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from rlfuse.cluster import scratch

SAVE_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
CONNECTORS = {
    "shm": ("MigrationConnector", "rlfuse.engines.vllm.kv_transfer.shared_memory"),
    "nixl": ("NixlMigrationConnector", "rlfuse.engines.vllm.kv_transfer.nixl"),
}
"""`rollout.kv_transfer` -> class and module, which vLLM's processes import by name."""


def connector_arguments(transfer: str) -> dict[str, Any]:
    """vLLM's KVTransferConfig for a way of CONNECTORS."""
    name, module = CONNECTORS[transfer]
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def remove(base: str) -> None:
    """All files of one KV cache."""
    for file in Path(base).parent.glob(f"{Path(base).name}.*"):
        file.unlink(missing_ok=True)


def withdraw(base: str) -> None:
    """Nobody is to take this KV cache from now on; one that is taken is left to its taker."""
    try:
        Path(f"{base}.tokens").unlink()
    except FileNotFoundError:
        return
    remove(base)


class KVCacheStore:
    """An engine's folder of KV caches. Made once per engine, closed with it."""

    def __init__(self) -> None:
        self.folder, self._lock = scratch.make(scratch.KV)
        self._names = itertools.count()
        self._wanted: set[str] = set()
        """Bases of requests under way whose caches are to be kept, see `want`."""
        self._coming: set[str] = set()
        """Keys of caches that this engine's active requests may take."""

    def new_base(self) -> str:
        """Where a request's KV cache would be, should it be wanted."""
        return f"{self.folder}/{next(self._names)}"

    def want(self, base: str) -> None:
        """To be said before the request is aborted."""
        self._wanted.add(base)
        Path(f"{base}.wanted").touch()

    def wanted(self, base: str) -> bool:
        """Whether `want` was said."""
        return base in self._wanted

    def end_request(self, base: str) -> None:
        """The request has ended, one way or the other."""
        if base in self._wanted:
            self._wanted.discard(base)
            Path(f"{base}.wanted").unlink(missing_ok=True)

    async def collect(self, base: str, version: int) -> str | None:
        """Wait until the aborted request's KV cache is written; its key, or None if there is none.

        The abort has reached the scheduler. `version`: of the weights that it was computed with.
        """
        saving = Path(f"{base}.saving")
        for _ in range(int(SAVE_TIMEOUT_S / 0.001)):
            if not saving.exists():
                break
            await asyncio.sleep(0.001)
        saving.unlink(missing_ok=True)
        return f"{version}@{base}" if Path(f"{base}.tokens").exists() else None

    def expect(self, key: str | None, version: int) -> str | None:
        """Where the KV cache of this key lies, on any store, if weights of this version computed it. Then `drop` it."""
        computed_with, _, base = (key or "").partition("@")
        if not base or int(computed_with) != version:
            return None
        self._coming.add(key)
        return base

    def drop(self, key: str | None) -> None:
        """The KV cache of this key is needed no more, on whichever store it is."""
        if key:
            self._coming.discard(key)
            withdraw(key.partition("@")[2])

    async def invalidate(self) -> None:
        """Before weights change: take back what the old ones computed, wait for what is being read already."""
        for key in [*self._coming]:
            self.drop(key)
        for file in self.folder.glob("*.tokens"):
            withdraw(str(file.with_suffix("")))
        for _ in range(int(READ_TIMEOUT_S / 0.001)):
            if not any(self.folder.glob("*.loading")):
                return
            await asyncio.sleep(0.001)
        raise TimeoutError(f"KV caches were not read from other engines within {READ_TIMEOUT_S:.0f} s: {self.folder}")

    def close(self) -> None:
        """Remove the folder."""
        scratch.remove(self.folder)
        self._lock.close()
