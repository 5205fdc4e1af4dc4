"""Locks of compiled extensions: those of the living are waited for, those of the dead removed."""

import os

import pytest

from rlfuse.engines.extensions import wait_for_extensions
from rlfuse.engines.protocols import EngineError


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (lock := tmp_path / "deepspeed_shm_comm" / "lock").touch()
    os.utime(lock, (0, 0))
    return lock


def test_a_lock_that_nobody_holds_is_removed_once_it_is_old(lock):
    wait_for_extensions(5.0)
    assert not lock.exists()


def test_a_lock_that_is_held_or_young_is_waited_for_and_named(lock):
    with lock.open(), pytest.raises(EngineError, match=f"{lock} has kept this rank waiting for 0 s"):
        wait_for_extensions(0.0)
    lock.touch()
    with pytest.raises(EngineError, match="another process compiles"):
        wait_for_extensions(0.0)
    assert lock.exists()
