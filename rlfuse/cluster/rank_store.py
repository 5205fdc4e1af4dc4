"""A torch store for process groups over several nodes, in rank 0's memory and reached by Ray calls.

torch's own TCP store answers everyone who connects; Ray's calls carry the cluster's token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import GetTimeoutError

STORE = "store"
"""Ray's concurrency group of `store_call`: rank 0 answers while it waits for the others itself."""
FIRST_POLL_S, LAST_POLL_S = 0.005, 0.2
CALL_S = 30.0
"""Limit of one call, after which NCCL's monitor continues without an answer: rank 0 may hang."""


class StoreServer:
    """Base of rank actors; rank 0 opens `store` first, and it lives as long as the actor."""

    store: dist.Store

    def open_store(self) -> None:
        self.store = dist.HashStore()

    def use_store(self, rank: int, first: ray.actor.ActorHandle, timeout: timedelta) -> dist.Store:
        if rank:
            self.store = RankStore(first)
        self.store.set_timeout(timeout)
        return self.store

    @ray.method(concurrency_group=STORE)
    def store_call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.store, method)(*arguments)


class RankStore(dist.Store):
    """The store of every rank but the first; `first` is rank 0's actor. torch calls the methods by these names."""

    def __init__(self, first: ray.actor.ActorHandle):
        super().__init__()
        self._first = first

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._call("get", key)

    def add(self, key: str, value: int) -> int:
        return self._call("add", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call("check", [*keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raise TimeoutError where another rank has not set one of the keys within the timeout."""
        limit_s = (timeout or self.timeout).total_seconds()
        until, pause_s = time.monotonic() + limit_s, FIRST_POLL_S
        while True:
            with suppress(GetTimeoutError):  # rank 0 may be busy
                if self.check(keys):
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"waited {limit_s:g} s for the other ranks to set {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(LAST_POLL_S, pause_s * 1.5)

    def deleteKey(self, key: str) -> bool:
        return self._call("delete_key", key)

    def clone(self) -> RankStore:
        return self

    def _call(self, method: str, *arguments: Any) -> Any:
        limit_s = min(CALL_S, self.timeout.total_seconds())
        return ray.get(self._first.store_call.remote(method, *arguments), timeout=limit_s)
