"""KV caches that may leave an engine with their samples: where they are, which are wanted, when they become invalid.

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
    """Return vLLM's KVTransferConfig for a key of CONNECTORS."""
    name, module = CONNECTORS[transfer]
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def remove(base: str) -> None:
    """Remove all files of one KV cache."""
    for file in Path(base).parent.glob(f"{Path(base).name}.*"):
        file.unlink(missing_ok=True)


def withdraw(base: str) -> None:
    """Remove a KV cache that no engine is reading."""
    try:
        Path(f"{base}.tokens").unlink()
    except FileNotFoundError:
        return
    remove(base)


class KVCacheStore:
    """An engine's folder of KV caches, created and closed with it."""

    def __init__(self) -> None:
        self.folder, self._lock = scratch.make(scratch.KV)
        self._names = itertools.count()
        self._bases: dict[str, str] = {}
        """Active sample -> where its KV cache would be put."""
        self._wanted: set[str] = set()
        """Active samples whose KV caches are to be kept."""
        self._coming: set[str] = set()
        """Keys of KV caches that active samples may load."""

    def parameters(self, sample_id: str, key: str | None, version: int) -> dict[str, str]:
        """Return the connector's parameters of a new request: where to `save` its KV cache if that is wanted, and where
        to `load` that of `key` from, if weights of this version computed it."""
        self._bases[sample_id] = f"{self.folder}/{next(self._names)}"
        computed_with, _, base = (key or "").partition("@")
        if not base or int(computed_with) != version:
            return {"save": self._bases[sample_id]}
        self._coming.add(key)
        return {"save": self._bases[sample_id], "load": base}

    def want(self, sample_id: str) -> None:
        """Keep the KV cache of a sample that is aborted after this call."""
        if base := self._bases.get(sample_id):
            self._wanted.add(sample_id)
            Path(f"{base}.wanted").touch()

    def wanted(self, sample_id: str) -> bool:
        """Whether `want` was called."""
        return sample_id in self._wanted

    async def collect(self, sample_id: str, version: int) -> str | None:
        """Wait until the KV cache of a wanted sample is written, after its abort; return its key, None if there is
        none."""
        base = self._bases[sample_id]
        saving = Path(f"{base}.saving")
        for _ in range(int(SAVE_TIMEOUT_S / 0.001)):
            if not saving.exists():
                break
            await asyncio.sleep(0.001)
        saving.unlink(missing_ok=True)
        return f"{version}@{base}" if Path(f"{base}.tokens").exists() else None

    def end(self, sample_id: str, key: str | None) -> None:
        """Forget a sample that came with the KV cache of `key`."""
        base = self._bases.pop(sample_id, None)
        if sample_id in self._wanted:
            self._wanted.discard(sample_id)
            Path(f"{base}.wanted").unlink(missing_ok=True)
        self.drop(key)

    def drop(self, key: str | None) -> None:
        """Withdraw the KV cache of this key, on whichever store it is."""
        if key:
            self._coming.discard(key)
            withdraw(key.partition("@")[2])

    async def invalidate(self) -> None:
        """Withdraw what the old weights computed before they change; wait for engines that are reading."""
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
