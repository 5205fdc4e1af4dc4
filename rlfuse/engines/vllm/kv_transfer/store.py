"""Store of KV caches that migrate with their samples: their paths, which are requested, and when they become invalid.

The store is a folder in /dev/shm, owned by the engine's `RolloutWorker`; the connectors in vLLM's processes find its
files by name. Waits a limited time for caches that are being written or read.
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
"""`rollout.kv_transfer` -> class and module, imported by vLLM's processes."""


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
    """Remove a KV cache unless an engine has started reading it."""
    try:
        Path(f"{base}.tokens").unlink()
    except FileNotFoundError:
        return
    remove(base)


class KVCacheStore:
    """Folder of an engine's KV caches, with the lifetime of the engine."""

    def __init__(self) -> None:
        self.folder, self._lock = scratch.make(scratch.KV)
        self._names = itertools.count()
        self._bases: dict[str, str] = {}
        """Active sample -> base path of its KV cache files."""
        self._save_requested: set[str] = set()
        """Active samples whose KV caches will be saved."""
        self._loadable: set[str] = set()
        """Keys of the KV caches that active samples may load."""

    def parameters(self, sample_id: str, key: str | None, version: int) -> dict[str, str]:
        """Return the connector's parameters of a new request: the path to `save` its KV cache if requested, and the
        path to `load` the cache of `key`, if weights of this version computed it."""
        self._bases[sample_id] = f"{self.folder}/{next(self._names)}"
        computed_with, _, base = (key or "").partition("@")
        if not base or int(computed_with) != version:
            return {"save": self._bases[sample_id]}
        self._loadable.add(key)
        return {"save": self._bases[sample_id], "load": base}

    def request_save(self, sample_id: str) -> None:
        """Request that the KV cache of a sample is saved when it is aborted after this call."""
        if base := self._bases.get(sample_id):
            self._save_requested.add(sample_id)
            Path(f"{base}.wanted").touch()

    def is_save_requested(self, sample_id: str) -> bool:
        """Return whether `request_save` was called for this sample."""
        return sample_id in self._save_requested

    async def wait_saved(self, sample_id: str, version: int) -> str | None:
        """Wait until the requested KV cache of an aborted sample is written; return its key, or None if there is
        none."""
        base = self._bases[sample_id]
        saving = Path(f"{base}.saving")
        for _ in range(int(SAVE_TIMEOUT_S / 0.001)):
            if not saving.exists():
                break
            await asyncio.sleep(0.001)
        saving.unlink(missing_ok=True)
        return f"{version}@{base}" if Path(f"{base}.tokens").exists() else None

    def forget(self, sample_id: str, key: str | None) -> None:
        """Remove a sample, and the KV cache of `key` that it arrived with."""
        base = self._bases.pop(sample_id, None)
        if sample_id in self._save_requested:
            self._save_requested.discard(sample_id)
            Path(f"{base}.wanted").unlink(missing_ok=True)
        self.drop(key)

    def drop(self, key: str | None) -> None:
        """Withdraw the KV cache of this key, in any store of the host."""
        if key:
            self._loadable.discard(key)
            withdraw(key.partition("@")[2])

    async def invalidate(self) -> None:
        """Withdraw all KV caches before the weights change; wait for engines that are reading."""
        for key in [*self._loadable]:
            self.drop(key)
        for file in self.folder.glob("*.tokens"):
            withdraw(str(file.with_suffix("")))
        for _ in range(int(READ_TIMEOUT_S / 0.001)):
            if not any(self.folder.glob("*.loading")):
                return
            await asyncio.sleep(0.001)
        raise TimeoutError(f"reading KV caches of other engines took more than {READ_TIMEOUT_S:.0f} s: {self.folder}")

    def close(self) -> None:
        """Remove the folder."""
        scratch.remove(self.folder)
        self._lock.close()
