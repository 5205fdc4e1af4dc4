"""Offloading: failed moves, pinned host memory, and waiting for device memory; host memory replaces the device."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from small_network import Network, loss

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.pipeline_rank import PipelineRank
from rlfuse.engines.trainer import base_rank, offloading
from rlfuse.engines.trainer.base_rank import Rank
from rlfuse.engines.trainer.offloading import fetch_optimizer, offloaded_bytes, on_device, to_device, to_host
from rlfuse.engines.trainer.saving import checkpoint_writer
from rlfuse.errors import EngineError
from rlfuse.protocols import DeviceSharing


def test_failed_move_can_be_repeated(monkeypatch):
    network = Network()
    with torch.no_grad():
        before = float(loss(network, 0))
        to_host(network)
        copy, failures = torch.Tensor.copy_, iter([False, True])
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", lambda *a, **k: 1 / 0 if next(failures, False) else copy(*a, **k))
            with pytest.raises(ZeroDivisionError):
                to_device(network)
        with on_device(network):
            assert float(loss(network, 0)) == before
        to_device(network)
        assert float(loss(network, 0)) == before


def trained():
    """Return a network with an optimizer, its moments, and copies of the moments."""
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters())
    loss(network, 0).backward()
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    network.step_tensors = lambda: [value for state in optimizer.state.values() for value in state.values()]
    network.tensors = lambda: [*network.parameters(), *network.buffers(), *network.step_tensors()]  # as in ShardedModel
    return network, moments, [moment.clone() for moment in moments]


@pytest.fixture
def offloaded():
    """Return `trained()` with the optimizer offloaded to the host."""
    network, moments, held = trained()
    to_host(network)
    to_device(network, optimizer=False)
    return network, moments, held


def are_resident(moments, held):
    pairs = zip(moments, held, strict=True)
    return all(moment.untyped_storage().nbytes() and torch.equal(moment, has) for moment, has in pairs)


def test_fetch_runs_in_the_background_and_is_awaited(offloaded, monkeypatch):
    network, moments, held = offloaded
    begin, copied = threading.Event(), offloading._copy_back
    monkeypatch.setattr(offloading, "_copy_back", lambda each: (begin.wait(60), copied(each)))
    size = offloaded_bytes(network)
    assert size >= 2 * sum(moment.nbytes for moment in moments) and float(loss(network, 1)), "weights are loaded"
    for _ in range(2):  # the second is a no-op
        fetch_optimizer(network, 60.0)
    assert offloaded_bytes(network) == size and len(offloading._fetches) == 1
    begin.set()
    to_device(network)
    assert are_resident(moments, held) and not offloaded_bytes(network) and network not in offloading._fetches
    fetch_optimizer(network, 60.0)
    assert network not in offloading._fetches, "nothing to fetch"


def test_fetch_timeout_is_reported_with_its_size(offloaded, monkeypatch):
    network, *_ = offloaded
    begin, copied = threading.Event(), offloading._copy_back
    monkeypatch.setattr(offloading, "_copy_back", lambda each: (begin.wait(60), copied(each)))
    size = offloaded_bytes(network)
    fetch_optimizer(network, 0.01)
    try:
        with pytest.raises(
            EngineError, match=rf"Loading {size:,} bytes of optimizer masters .* than 0.01 s.*_residency=training"
        ):
            to_device(network)
    finally:
        begin.set()
        offloading._fetching.submit(int).result(60.0)  # wait for the thread, as the next test patches it


def test_fetch_without_device_memory_is_repeated_by_the_move(offloaded, monkeypatch):
    network, moments, held = offloaded
    copied, failures = offloading._copy_back, iter([False, True])

    def full(each):
        if next(failures, False):
            raise torch.OutOfMemoryError
        copied(each)

    size = offloaded_bytes(network)
    monkeypatch.setattr(offloading, "_copy_back", full)
    fetch_optimizer(network, 60.0)
    with pytest.raises(torch.OutOfMemoryError):
        offloading._fetches[network].done.result(60.0)
    assert offloaded_bytes(network) == size and not any(moment.untyped_storage().nbytes() for moment in moments)
    to_device(network)
    assert are_resident(moments, held)


def test_no_fetch_while_the_engine_uses_the_device_or_during_a_move(offloaded):
    network, moments, held = offloaded
    with ThreadPoolExecutor(1) as executor, offloading._moving:
        executor.submit(fetch_optimizer, network, 60.0).result(60.0)
    assert network not in offloading._fetches
    to_host(network)
    fetch_optimizer(network, 60.0)
    assert network not in offloading._fetches
    to_device(network)
    assert are_resident(moments, held)
    to_host(network, optimizer_alone=True)
    assert not any(moment.untyped_storage().nbytes() for moment in moments) and float(loss(network, 1))


def test_saving_a_pipeline_bucket_leaves_the_optimizer_offloaded(offloaded, tmp_path):
    network, moments, _ = offloaded
    rank, before, seen = PipelineRank(Config(), 0, 1, "cuda"), float(loss(network, 1)), []

    def write(*_):
        seen.append((float(loss(network, 1)), [moment.untyped_storage().nbytes() for moment in moments]))

    rank.engines, rank._exporter = {"actor": network}, lambda *_: SimpleNamespace(write=write)
    for move in (offloaded_bytes, to_host):  # with weights loaded, then offloaded
        move(network)
        size = offloaded_bytes(network)
        assert rank.save_bucket("actor", 3, [], tmp_path) == (None, None) and offloaded_bytes(network) == size
    assert seen == [(before, [0] * len(moments))] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned with CUDA")
def test_failure_to_pin_host_memory_is_reported_with_remedies():
    with pytest.raises(
        EngineError, match=r"4096 bytes of host memory could not be pinned.*MiB free.*--mem.*n_gpus_per_node"
    ):
        offloading.pinned(4096, pin=True)


def test_storages_share_pieces_of_pinned_memory(monkeypatch):
    """Check the pieces: torch rounds each up to a power of two, so one per tensor would use up to twice the bytes."""
    monkeypatch.setattr(offloading, "_PIECE", 1024)
    taken, pinned = [], offloading.pinned
    monkeypatch.setattr(offloading, "pinned", lambda size, pin: (taken.append(size), pinned(size, False))[1])
    network = Network()
    with torch.no_grad():
        before, total = float(loss(network, 0)), sum(each.nbytes() for each in offloading._storages(network))
        to_host(network)
        to_device(network)
        assert float(loss(network, 0)) == before
    assert set(taken[:-1]) == {1024} and taken[-1] <= 1024 and total <= sum(taken) < total + 1024


def test_rank_waits_for_the_memory_of_a_killed_engine(monkeypatch):
    rank, tries = Rank(Config(), 0, 1, "cuda"), []
    rank.engines = {"actor": Network()}

    def full(model, optimizer):
        tries.append(model)
        if len(tries) < 3:
            raise torch.OutOfMemoryError
        to_device(model, optimizer)

    monkeypatch.setattr(base_rank, "to_device", full)
    monkeypatch.setattr(base_rank.time, "sleep", lambda seconds: None)
    rank.switch("rollout")
    rank.switch("trainer")
    assert len(tries) == 3 and not rank.is_offloaded
    rank.switch("rollout")
    monkeypatch.setattr(base_rank, "FREE_TIMEOUT_S", -1.0)
    tries.clear()
    with pytest.raises(torch.OutOfMemoryError):
        rank.switch("trainer")
    assert len(tries) == 1 and rank.is_offloaded


def test_checkpoint_files_of_a_rank_are_synced(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), synced.append(os.readlink(f"/proc/self/fd/{file}"))))
    with checkpoint_writer() as files:
        files.write(tmp_path / "state", lambda: (tmp_path / "state").write_text("s"))
        assert synced == [str(tmp_path / "state")]
        files.write(tmp_path, lambda: (tmp_path / "config.json").write_text("{}"))
    assert {str(tmp_path), str(tmp_path / "config.json")} <= set(synced) and files.problem is None


# Memory limits of a rank


@pytest.mark.parametrize("cached, emptied", [(5, []), (6, ["emptied"])])
def test_cached_memory_is_released_if_it_exceeds_the_limit(cached, emptied, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100 + cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    offloading.release_cached(5)
    assert done == emptied


def test_host_memory_is_pinned_once_in_the_background(monkeypatch):
    pieces, begin = [], threading.Event()

    def pinned(size, pin):
        begin.wait(60)
        pieces.append((size, pin))

    monkeypatch.setattr(offloading, "_pinning", None)
    monkeypatch.setattr(offloading, "pinned", pinned)
    monkeypatch.setattr(offloading, "free_bytes", lambda: time.sleep(0.05) or 1 << 40)
    offloading.start_pinning(0)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(offloading.start_pinning, 2 * [2 * offloading._PIECE + 1]))
    offloading.start_pinning(5)
    assert not pieces, "the call returned before pinning"
    begin.set()
    offloading._pinning.join(60)
    time.sleep(0.01)  # time for a second thread
    assert pieces == 3 * [(offloading._PIECE, True)]


def test_rank_applies_the_planned_device_sharing(monkeypatch):
    calls = []
    for name in ("release_cached", "start_pinning"):
        monkeypatch.setattr(base_rank, name, lambda size, name=name: calls.append((name, size)))
    fraction = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, fraction, lambda share: calls.append((fraction, share)))
    monkeypatch.setattr(Rank, "device_bytes", lambda self: 1000)
    rank, network = Rank(Config(), 0, 1, "cuda"), Network()
    rank.extra_modules = [network]
    rank.share(DeviceSharing(max_cached_bytes=7, max_cached_bytes_in_push=3, pinned_host_bytes=100_000))
    rank.switch("rollout")
    assert calls == [("release_cached", 7), ("start_pinning", 100_000 - offloaded_bytes(network))]
    rank.switch("trainer")
    rank.make_room()
    assert calls[2:] == [("release_cached", 3)]
    rank.share(DeviceSharing(alternates=False, max_rank_bytes=250))
    assert calls[3:] == [(fraction, 0.25)]


def test_step_residency_offloads_the_optimizer_of_resident_models():
    config, (network, moments, held) = Config(), trained()
    config.actor.optimizer_residency = "step"
    rank = Rank(config, 0, 1, "cuda")
    rank.engines = {"actor": network}
    rank.share(DeviceSharing(alternates=False))
    assert not any(moment.untyped_storage().nbytes() for moment in moments)
    before = offloaded_bytes(network)
    with rank.stepping("actor"):
        assert are_resident(moments, held)
    assert offloaded_bytes(network) == before > 0
