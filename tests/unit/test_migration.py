"""KV-cache transfer between the blocks of two engines, in every cache layout of vLLM on CPUs and GPUs."""

import shutil
from pathlib import Path

import pytest
import torch

from rlfuse.engines.vllm.kv_transfer.store import KVCacheStore
from rlfuse.engines.vllm.setup import resolve_kv_transfer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process, as importing vLLM is slow

LAYERS, BLOCK, BLOCKS = ["layer.0", "layer.1", "layer.2"], 32, 12


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Return the class `Engine`, within an initialized distributed environment."""
    from vllm.distributed import parallel_state

    store = tmp_path_factory.mktemp("store") / "world"
    parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    yield Engine
    parallel_state.destroy_distributed_environment()


class Engine:
    """A rank's KV cache in the engine's layout, with its connector."""

    def __init__(self, name: str, kernel_block: int, seed: int):
        from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        from rlfuse.engines.vllm.kv_transfer.shared_memory import MigrationConnector
        from rlfuse.engines.vllm.kv_transfer.store import connector_arguments

        layout = KVCacheLayout[name]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
        config = VllmConfig(
            cache_config=CacheConfig(block_size=BLOCK),
            parallel_config=ParallelConfig(),
            scheduler_config=SchedulerConfig(max_model_len=512, is_encoder_decoder=False),
            kv_transfer_config=KVTransferConfig(**connector_arguments("shm")),
        )
        config.cache_config.kv_cache_layout = layout.name
        self.block_bytes = len(LAYERS) * spec.page_size_bytes
        placed = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(LAYERS, spec)], BLOCKS * self.block_bytes)
        assert placed.num_blocks == BLOCKS
        self.caches = allocate_kv_cache(placed, torch.device("cpu"), layout, [kernel_block])
        torch.manual_seed(seed)
        for cache in self.caches.values():
            cache.copy_(torch.randn(cache.shape))
        self.connector = MigrationConnector(config, KVConnectorRole.WORKER, placed)
        self.connector.register_kv_caches(self.caches)

    def step(self, **transfer) -> None:
        from rlfuse.engines.vllm.kv_transfer.shared_memory import Transfer

        self.connector.bind_connector_metadata(Transfer(**transfer))
        self.connector.start_load_kv(None)

    def block(self, layer: str, index: int) -> torch.Tensor:
        """Return the keys and values of a block, in any layout."""
        rows = self.caches[layer].shape[0] // BLOCKS
        return self.caches[layer][index * rows : (index + 1) * rows]


LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SMALLER = ("LBHNC", "LBNHC")
"""Layouts with contiguous blocks: attention may use smaller blocks than the scheduler."""


def test_all_layouts_are_covered():
    from vllm.v1.kv_cache_interface import KVCacheLayout

    assert tuple(layout.name for layout in KVCacheLayout) == LAYOUTS
    assert tuple(each.name for each in KVCacheLayout if each.is_layer_compact and each.is_block_compact) == SMALLER


@pytest.mark.parametrize(
    "layout, kernel", [*((name, BLOCK) for name in LAYOUTS), *((name, BLOCK // 2) for name in SMALLER)]
)
def test_blocks_are_copied_to_their_targets_and_no_other_block_changes(tmp_path: Path, engine, layout, kernel):
    source, target = engine(layout, kernel, 1), engine(layout, kernel, 2)
    before = {layer: cache.clone() for layer, cache in target.caches.items()}
    base = str(tmp_path / "7")
    source.step(saves=[("request", base, [3, 9, 4])])
    assert source.connector.get_finished([]) == ({"request"}, None)
    target.step(loads=[(base, [11, 2], 1)])  # the first is in the target's prefix cache
    assert not target.connector.get_block_ids_with_load_errors()
    for layer in LAYERS:
        for loaded, original in ((11, 9), (2, 4)):
            assert torch.equal(target.block(layer, loaded), source.block(layer, original))
        changed = (target.caches[layer] != before[layer]).flatten(1).any(1).unflatten(0, (BLOCKS, -1)).any(1)
        assert changed.nonzero().flatten().tolist() == [2, 11]
    assert not list(tmp_path.iterdir())


def test_required_disk_space_is_that_of_the_blocks(tmp_path: Path, engine):
    one, free = engine(LAYOUTS[0], BLOCK, 0), shutil.disk_usage(tmp_path).free
    assert one.connector._has_space(free // one.block_bytes // 4, tmp_path) is True
    assert one.connector._has_space(free // one.block_bytes, tmp_path) is False


def test_nixl_is_refused_if_engines_sleep():
    assert resolve_kv_transfer("auto", "cuda") == resolve_kv_transfer("auto", "cpu") == "shm"
    with pytest.raises(
        ValueError,
        match=r"rollout.kv_transfer=nixl: .*a sleeping engine frees the memory.*set rollout.kv_transfer=auto",
    ):
        resolve_kv_transfer("nixl", "cuda")


async def test_requested_kv_cache_is_kept_until_weights_change():
    store = KVCacheStore()
    try:
        base = store.parameters("1/0/0", None, 3)["save"]
        store.request_save("1/0/0")
        store.request_save("not begun")
        Path(f"{base}.wanted").rename(f"{base}.tokens")  # as the ranks do after saving
        key = await store.wait_saved("1/0/0", 3)
        assert key == f"3@{base}" and store.is_save_requested("1/0/0") and not store.is_save_requested("not begun")
        store.forget("1/0/0", None)
        assert "load" not in store.parameters("1/0/0", key, 4), "computed with other weights"
        assert store.parameters("1/0/0", key, 3)["load"] == base and not store.is_save_requested("1/0/0")
        await store.invalidate()
        assert not list(store.folder.glob("*.tokens"))
        store.request_save("1/0/0")
        assert await store.wait_saved("1/0/0", 4) is None, "nothing was written"
        store.forget("1/0/0", key)
        assert not list(store.folder.glob("*.wanted"))
    finally:
        store.close()
    assert not store.folder.exists()
