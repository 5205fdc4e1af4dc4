"""Read KV caches directly from another engine's blocks through NIXL: vLLM's KV connector for `nixl`.

    evict(carry=kv) --.wanted--> scheduler: request ends, blocks are kept; writes .held, and their ids to .tokens
                                     |
    generate(partial) on another engine: the reader that unlinks .tokens owns the blocks
        its scheduler: .loading --> ranks read while others decode --> sample is scheduled, .loading is removed
                                     |  NIXL notifies the source
        source's scheduler: frees the blocks, removes .held

Paths and keys are those of `store.KVCacheStore`. Invariants: `.tokens` is unlinked once, by the reader or by
`withdraw`, and `.held` is removed only afterwards; then the scheduler frees the blocks. A reader has LEASE_S - HOLD_S.
Unread blocks are freed after HOLD_S, or when the sample is dropped or the weights change. Missing caches are prefilled.
While blocks are held, vLLM steps the scheduler every millisecond and NIXL uses 0.4 of a core per rank. Not supported on
GPUs, where an engine wakes with other memory at the registered addresses.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPullConnectorScheduler
from vllm.utils.network_utils import get_open_port
from vllm.v1.request import RequestStatus

from rlfuse.engines.vllm.kv_transfer.store import remove, withdraw

HOLD_S = 10.0
"""Time after which unread blocks of an evicted sample are freed."""
LEASE_S = 30
"""Time that blocks are kept for a reader that has started."""


class NixlMigrationScheduler(NixlPullConnectorScheduler):
    """Scheduler side of the connector. `kv_transfer_params` of a request: `save`, and `load` if it has a KV cache."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any):
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.side_channel_host, self.side_channel_port = "localhost", get_open_port()
        self._kv_lease_duration = LEASE_S
        self._held: dict[str, tuple[str, float]] = {}
        """Ended request -> (base, time at which its blocks are freed)."""
        self._claimed: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
        """Request -> (`.loading`, `.tokens`, its content), for requests claimed in the step being scheduled."""
        self._loading: dict[str, Path] = {}

    # Source ----------------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        loading = self._loading.pop(request.request_id, None)
        base = (request.kv_transfer_params or {}).get("save")
        if loading:
            loading.unlink()
        if not base or not (wanted := Path(f"{base}.wanted")).exists():
            return False, None
        wanted.unlink()
        blocks = (request.num_computed_tokens - request.num_in_flight_tokens) // self.block_size
        if loading or request.status != RequestStatus.FINISHED_ABORTED or len(block_ids) > 1 or not blocks:
            return False, None
        # vLLM's scheduler treats it as a finished prefill, whose blocks other engines may read.
        prefilled = SimpleNamespace(
            request_id=request.request_id,
            status=RequestStatus.FINISHED_STOPPED,
            kv_transfer_params={"do_remote_decode": True},
            num_computed_tokens=blocks * self.block_size,
        )
        held, source = super().request_finished(prefilled, (block_ids[0][:blocks],))
        self._reqs_in_batch.add(request.request_id)  # otherwise the ranks take it for an earlier request
        self._held[request.request_id] = base, time.perf_counter() + HOLD_S
        Path(f"{base}.held").touch()
        Path(f"{base}.tokens").write_text(json.dumps(source))
        return held, None

    def _release(self) -> None:
        """End the lease of unread blocks; ranks report them as sent, then vLLM frees them."""
        now = time.perf_counter()
        for request_id, (base, until) in self._held.items():
            if now > until:
                withdraw(base)
            if not Path(f"{base}.held").exists():
                self._reqs_need_send[request_id] = now

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            remove(self._held.pop(request_id)[0])

    # Destination -----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not (base := params.get("load")) or request.request_id in self._loading:  # the latter if its transfer failed
            return 0, False
        loading, ready = Path(f"{params['save']}.loading"), Path(f"{base}.tokens")
        try:
            source = json.loads(ready.read_text())
            blocks = min(source["remote_num_tokens"], request.num_tokens - 1) // self.block_size
            if (count := blocks * self.block_size - num_computed_tokens) <= 0:
                return 0, False
            loading.touch()
            ready.unlink()
        except FileNotFoundError:  # already read (the request was preempted since), or withdrawn
            loading.unlink(missing_ok=True)
            return 0, False
        self._claimed[request.request_id] = loading, ready, source
        return count, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if num_external_tokens:
            self._loading[request.request_id], _, source = self._claimed.pop(request.request_id)
            [remote] = source["remote_block_ids"]
            count = (request.num_tokens - 1) // self.block_size  # as many as were allocated here
            params |= source | {"remote_block_ids": (remote[:count],)}
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif "load" in params:
            withdraw(params["load"])  # the prefix cache has at least as many blocks

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for loading, ready, source in self._claimed.values():  # it did not fit into this step
            loading.unlink()
            with suppress(FileNotFoundError):  # the source engine has stopped
                ready.write_text(json.dumps(source))
        self._claimed.clear()
        for started in scheduler_output.scheduled_new_reqs:
            if loading := self._loading.pop(started.req_id, None):
                loading.unlink()
        self._release()
        return super().build_connector_meta(scheduler_output)


class NixlMigrationConnector(NixlPullConnector):
    """vLLM's NIXL connector with `NixlMigrationScheduler` as its scheduler side."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)  # on CPU hosts vLLM binds the process to the last core in this constructor
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlMigrationScheduler(vllm_config, self.engine_id, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a missing cache is prefilled
