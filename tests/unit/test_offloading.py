"""Moves that fail, that take little host memory, and that wait for device memory; on this process's memory."""

import os

import pytest
import torch
from small_network import Network, loss

from rlfuse.config.schema import Config
from rlfuse.engines.trainer import base_rank, offloading
from rlfuse.engines.trainer.base_rank import Rank
from rlfuse.engines.trainer.offloading import on_device, to_device, to_host
from rlfuse.engines.trainer.saving import writing
from rlfuse.errors import EngineError


def test_a_move_that_fails_can_be_made_again(monkeypatch):
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_host_memory_that_can_not_be_pinned_is_told_with_what_to_change():
    with pytest.raises(EngineError, match=r"4096 bytes more of host memory.*MiB free.*--mem.*n_gpus_per_node"):
        offloading._pinned(4096, pin=True)


def test_storages_share_pieces_of_pinned_memory(monkeypatch):
    """torch rounds each piece up to a power of two: one for each tensor would take up to twice the bytes."""
    monkeypatch.setattr(offloading, "_PIECE", 1024)
    taken, pinned = [], offloading._pinned
    monkeypatch.setattr(offloading, "_pinned", lambda size, pin: (taken.append(size), pinned(size, False))[1])
    network = Network()
    with torch.no_grad():
        before, total = float(loss(network, 0)), sum(each.nbytes() for each in offloading._storages(network))
        to_host(network)
        to_device(network)
        assert float(loss(network, 0)) == before
    assert set(taken[:-1]) == {1024} and taken[-1] <= 1024 and total <= sum(taken) < total + 1024


def test_a_rank_waits_for_the_memory_of_an_engine_that_was_killed(monkeypatch):
    rank, tries = Rank(Config(), 0, 1, "cuda"), []
    rank.engines = {"actor": Network()}

    def full(model):
        tries.append(model)
        if len(tries) < 3:
            raise torch.OutOfMemoryError
        to_device(model)

    monkeypatch.setattr(base_rank, "to_device", full)
    monkeypatch.setattr(base_rank.time, "sleep", lambda seconds: None)
    rank.switch("rollout")
    rank.switch("trainer")
    assert len(tries) == 3 and not rank.away
    rank.switch("rollout")
    monkeypatch.setattr(base_rank, "FREED_S", -1.0)
    tries.clear()
    with pytest.raises(torch.OutOfMemoryError):
        rank.switch("trainer")
    assert len(tries) == 1 and rank.away


def test_what_a_rank_writes_of_a_checkpoint_is_handed_to_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), synced.append(os.readlink(f"/proc/self/fd/{file}"))))
    with writing() as files:
        files.write(tmp_path / "state", lambda: (tmp_path / "state").write_text("s"))
        assert synced == [str(tmp_path / "state")]
        files.write(tmp_path, lambda: (tmp_path / "config.json").write_text("{}"))
    assert {str(tmp_path), str(tmp_path / "config.json")} <= set(synced) and files.problem is None
