"""Move KV caches with samples between engines of a host through /dev/shm: vLLM's KV connector for `shm`.

    evict(carry=kv) --.wanted--> scheduler: request ends, blocks are held, .wanted becomes .saving
                                     |  next step
                                     v
       actor waits until        every rank: full blocks --> .0 .1 ...      after the last rank: .saving becomes .tokens
       .saving is gone; its Partial has the key
                                                                     |
    generate(partial) on another engine: its scheduler finds .tokens; every rank loads and removes its file

Invariants: only full blocks are moved, and the loading engine computes at least the prompt's last token. `.tokens`
appears after all ranks have written their files, and the reader removes them. New weights invalidate caches of old
ones. Missing, outdated or too large caches are prefilled, and so are models with several KV cache groups. On GPUs,
ranks copy on the model's stream; addresses stay valid across sleep and wake.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_world_group

from rlfuse.engines.vllm.kv_transfer.store import remove


@dataclass
class Transfer(KVConnectorMetadata):
    """Saves and loads of the ranks in one step."""

    saves: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """(request, base, its full blocks)."""
    loads: list[tuple[str, list[int], int]] = field(default_factory=list)
    """(base, blocks to fill, index of the first one in the file)."""


class MigrationConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector over shared memory. `kv_transfer_params` of a request: `save`, and `load` if it has a KV cache."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._ranks = vllm_config.parallel_config.world_size
        self._next = Transfer()
        self._saving: dict[str, tuple[str, int]] = {}
        """Scheduler side: request -> (base, tokens) that ranks are writing."""
        self._saved: set[str] = set()
        self._missing: set[int] = set()
        self._layers: dict[str, torch.Tensor] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a missing cache is prefilled

    # Scheduler side ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        base = (request.kv_transfer_params or {}).get("load")
        return max(0, self._usable(request, base) * self._block_size - num_computed_tokens), False

    def _usable(self, request: Any, base: str | None) -> int:
        """Return the number of full blocks at `base`, excluding the request's last token."""
        try:
            stored = int(Path(f"{base}.tokens").read_text()) if base else 0
        except FileNotFoundError:  # already read: the request was preempted since
            stored = 0
        return min(stored, request.num_tokens - 1) // self._block_size

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        base = (request.kv_transfer_params or {}).get("load")
        if not base:
            return
        if num_external_tokens:
            # The prefix cache provides the first blocks; `request.num_computed_tokens` is not yet updated.
            end = self._usable(request, base)
            first = end - num_external_tokens // self._block_size
            self._next.loads.append((base, blocks.get_block_ids()[0][first:end], first))
            Path(f"{base}.tokens").unlink(missing_ok=True)
        else:
            remove(base)  # the prefix cache has at least as many blocks

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        base = (request.kv_transfer_params or {}).get("save")
        if not base or not (wanted := Path(f"{base}.wanted")).exists():
            return False, None
        blocks = request.num_computed_tokens // self._block_size
        if (
            "ABORT" not in request.status.name
            or len(block_ids) > 1
            or not blocks
            or not self._has_space(blocks, wanted)
        ):
            wanted.rename(f"{base}.saving").unlink()
            return False, None
        wanted.rename(f"{base}.saving")
        self._saving[request.request_id] = base, blocks * self._block_size
        self._next.saves.append((request.request_id, base, block_ids[0][:blocks]))
        return True, None  # vLLM keeps the blocks until `get_finished` names the request

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def _has_space(self, blocks: int, file: Path) -> bool:
        """Return whether shared memory has space for twice as many blocks."""
        cache = self._kv_cache_config
        block = cache.kv_cache_tensors[0].size // cache.num_blocks * self._ranks  # each tensor reports the total size
        return shutil.disk_usage(file.parent).free > 2 * blocks * block

    def build_connector_meta(self, scheduler_output: Any) -> Transfer:
        transfer, self._next = self._next, Transfer()
        return transfer

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_sending or ():
            base, tokens = self._saving.pop(request_id)
            saving = Path(f"{base}.saving")
            if saving.exists():  # otherwise the actor no longer waits for it
                saving.write_text(str(tokens))
                saving.rename(f"{base}.tokens")
            else:
                remove(base)

    def reset_cache(self) -> bool:
        return True  # the engine's actor manages the files

    # Rank side ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        transfer = self._get_connector_metadata()
        for request_id, base, blocks in transfer.saves:
            self._save(base, blocks)
            self._saved.add(request_id)
        for base, blocks, first in transfer.loads:
            self._load(base, blocks, first)

    def _save(self, base: str, blocks: list[int]) -> None:
        index = torch.tensor(blocks)
        tensors = {
            name: self._blocks(cache)[index.to(cache.device)].cpu().contiguous() for name, cache in self._layers.items()
        }
        try:
            save_file(tensors, self._file(base))
        except (OSError, SafetensorError):  # no space left: the reader finds no file and prefills
            self._file(base).unlink(missing_ok=True)

    @staticmethod
    def _file(base: str) -> Path:
        """Return this rank's file; a rank has the same layers and heads in all engines."""
        return Path(f"{base}.{get_world_group().rank_in_group}")

    def _load(self, base: str, blocks: list[int], first: int) -> None:
        """Fill the blocks; vLLM recomputes them if the file is gone (its sample was evicted meanwhile)."""
        path = self._file(base)
        try:
            with safe_open(path, "pt") as file:
                for name, cache in self._layers.items():
                    part = file.get_slice(name)[first : first + len(blocks)]
                    index = torch.tensor(blocks, device=cache.device)
                    self._blocks(cache)[index] = part.to(cache.device)
        except (FileNotFoundError, SafetensorError):
            self._missing.update(blocks)
        path.unlink(missing_ok=True)

    def _blocks(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a view of the layer's cache by scheduler blocks, which consist of one or more attention blocks."""
        return cache.unflatten(0, (self._kv_cache_config.num_blocks, -1))

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, None]:
        saved, self._saved = self._saved, set()
        return saved or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: caches are saved after a request ends."""

    def wait_for_save(self) -> None:
        """Do nothing: saves are complete when `start_load_kv` returns."""
