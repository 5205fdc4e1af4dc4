"""The embedding cache of a node: complete entries, size limit, held entries, removal, and the disk tier."""

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlfuse.cluster import scratch
from rlfuse.errors import EngineError
from rlfuse.samples import Embedding
from rlfuse.video.cache import EmbeddingCache
from rlfuse.video.embedding import content_hash, embedding_key, write_rows

TOKENS, HIDDEN = 6, 8
BYTES = TOKENS * HIDDEN * 2


@pytest.fixture
def make(tmp_path):
    caches = []

    def cache(entries=4, **settings):
        caches.append(EmbeddingCache(entries * BYTES, root=str(tmp_path), **settings))
        return caches[-1]

    yield cache
    for cache in caches:
        if cache.folder.exists():
            cache.close()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def put(cache, key, holder="step", seed=0) -> Embedding:
    write_rows(cache.reserve(key, TOKENS, HIDDEN, holder), 0, rows(seed))
    return cache.commit(key)


def lookup(cache, key, holder="step"):
    return cache.lookup(key, TOKENS, HIDDEN, holder)


def test_parts_written_in_any_order_are_read_as_bf16(make):
    cache = make()
    target = cache.reserve("a", TOKENS, HIDDEN, "step")
    write_rows(target, 4, rows(0)[4:])
    write_rows(target, 0, rows(0)[:4])
    assert lookup(cache, "a") is None  # not complete yet
    handle = cache.commit("a")
    assert handle == lookup(cache, "a") == Embedding("a", handle.path, TOKENS, HIDDEN)
    assert torch.equal(handle.read(), rows(0).bfloat16())


def test_writes_of_a_reader_do_not_change_the_cache(make):
    handle = put(make(), "a")
    mine = handle.read()
    mine.zero_()
    assert torch.equal(handle.read(), rows(0).bfloat16())


def test_the_least_recently_used_entry_is_evicted_and_held_entries_are_kept(make):
    cache = make(entries=3)
    for key in "abc":
        put(cache, key, holder=f"step of {key}")
    cache.release("step of b")
    cache.release("step of c")
    lookup(cache, "b", "later")
    cache.release("later")  # b was used after c
    mapped = lookup(cache, "c", "later").read()
    cache.release("later")
    lookup(cache, "b", "later")
    put(cache, "d")
    assert [key for key in "abcd" if lookup(cache, key)] == ["a", "b", "d"]
    assert torch.equal(mapped, rows(0).bfloat16())  # a mapped entry stays readable
    assert cache.counters() == {
        "evicted": 1, "disk_hits": 0, "disk_failures": 0, "received_bytes": 0,
        "bytes": 3 * BYTES, "held_bytes": 3 * BYTES,
    }  # fmt: skip


def test_a_full_cache_reports_its_holder(make):
    cache = make(entries=1)
    put(cache, "a", holder="step 7")
    with pytest.raises(EngineError, match=r"held by step 7.*Raise the limit"):
        cache.reserve("b", TOKENS, HIDDEN, "step 8")
    cache.release("step 7")
    cache.reserve("b", TOKENS, HIDDEN, "step 8")
    assert lookup(cache, "a") is None


def test_memory_is_reserved_before_it_is_written(make):
    cache = make(entries=1 << 60)
    with pytest.raises(EngineError, match="shm-size"):
        cache.reserve("a", 1 << 50, HIDDEN, "step")
    assert cache.counters()["bytes"] == 0 and [path.name for path in cache.folder.iterdir()] == ["lock"]


def test_an_abandoned_entry_is_removed(make):
    cache = make()
    cache.reserve("a", TOKENS, HIDDEN, "step")
    cache.abandon("a")
    assert [path.name for path in cache.folder.iterdir()] == ["lock"]
    put(cache, "a")


def test_reading_a_dropped_embedding_is_an_error(make):
    cache = make()
    handle = put(cache, "a")
    cache.abandon("a")
    with pytest.raises(EngineError, match=r"Embedding a is not at .*a\.bf16: it was dropped"):
        handle.read()


def test_close_removes_its_folder_and_not_that_of_a_running_run(make, tmp_path):
    cache = make()
    put(cache, "a")
    other = EmbeddingCache(BYTES, root=str(tmp_path))  # removes leftovers at startup
    assert lookup(cache, "a")
    other.close()
    assert not other.folder.exists()


def _hold_cache(root: str, ready) -> None:
    cache = EmbeddingCache(BYTES, root=root)
    put(cache, "a")
    ready.set()
    signal.pause()


def test_the_folder_of_a_killed_run_is_removed_by_the_next(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=_hold_cache, args=(str(tmp_path), ready), daemon=True)
    owner.start()
    assert ready.wait(30)
    (folder,) = tmp_path.iterdir()
    assert scratch.sweep(scratch.EMBEDDINGS, tmp_path) == []
    os.kill(owner.pid, signal.SIGKILL)
    owner.join(30)
    assert scratch.sweep(scratch.EMBEDDINGS, tmp_path) == [folder]
    assert not folder.exists()


def test_disk_tier_survives_the_run(make, tmp_path):
    disk = str(tmp_path / "disk")
    first = make(disk=disk)
    put(first, "a", seed=3)
    first.close()
    second = make(disk=disk)
    assert torch.equal(lookup(second, "a").read(), rows(3).bfloat16())
    assert lookup(second, "b") is None
    assert second.counters()["disk_hits"] == 1


def test_an_entry_is_on_disk_before_it_is_evicted(make, tmp_path):
    cache = make(entries=1, disk=str(tmp_path / "disk"))
    for seed, key in enumerate("abc"):
        put(cache, key, seed=seed)
        cache.release("step")
    assert torch.equal(lookup(cache, "a").read(), rows(0).bfloat16())


def test_a_truncated_file_on_disk_is_a_miss_and_reported(make, tmp_path):
    disk = tmp_path / "disk"
    first = make(disk=str(disk))
    put(first, "a")
    first.close()
    os.truncate(disk / "a.bf16", BYTES - 2)
    second = make(disk=str(disk))
    assert lookup(second, "a") is None
    assert "94 bytes instead of 96" in second.problems()[0]
    put(second, "a")  # its space was freed


def test_disk_tier_keeps_the_most_recently_used_entries(make, tmp_path):
    disk = tmp_path / "disk"
    cache = make(disk=str(disk), disk_bytes=2 * BYTES)
    for key in "ab":
        put(cache, key)
        cache.disk.finish(key)
    os.utime(disk / "b.bf16", (0, 0))
    put(cache, "c")
    cache.disk.finish("c")
    assert sorted(file.name for file in disk.iterdir()) == ["a.bf16", "c.bf16"]


def test_key_depends_on_content_plan_and_tower(tmp_path):
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"one")
    plan, other = SimpleNamespace(hash="p"), SimpleNamespace(hash="q")
    keys = {embedding_key(content_hash(clip), plan, "tower"), embedding_key(content_hash(clip), other, "tower")}
    keys.add(embedding_key(content_hash(clip), plan, "tower+1"))
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(b"one")
    assert embedding_key(content_hash(copy), plan, "tower") in keys
    clip.write_bytes(b"two!")
    keys.add(embedding_key(content_hash(clip), plan, "tower"))
    assert len(keys) == 4


def test_bytes_are_transferred_to_another_node_unchanged(make):
    sender, receiver = make(), make()
    put(sender, "a", seed=5)
    receiver.reserve("a", TOKENS, HIDDEN, "step")
    receiver.write("a", 0, sender.read("a"))
    handle = receiver.commit("a")
    assert torch.equal(handle.read(), rows(5).bfloat16())
    assert Path(handle.path).parent == receiver.folder != sender.folder
