"""Locks of compiled extensions: those of the living are waited for and named, those of the dead removed at once."""

import os
import signal
import socket
import time
from unittest.mock import AsyncMock, MagicMock

import pytest
from torch.utils import cpp_extension

from rlfuse.config.schema import Config
from rlfuse.engines.deepspeed import deepspeed_ops
from rlfuse.engines.deepspeed.deepspeed_ops import load, load_on_all_ranks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """torch's, not made yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    return tmp_path / "deepspeed_shm_comm" / "lock"


def killed_while_it_compiles(lock):
    """The number of a process that is no more."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            load(lambda: (lock.touch(), os.write(writing, b"x"), time.sleep(60)))
        finally:
            os._exit(1)
    assert os.read(reading, 1) == b"x"
    assert load(int, patience_s=0) == (
        f"DeepSpeed's operations are being compiled or loaded by process {child} of {socket.gethostname()} "
        f"({lock.parent.parent / deepspeed_ops.LOCK})"
    )
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("cache", [None, "/somewhere/cache"])
def test_operations_lie_where_torch_looks_for_them(monkeypatch, cache):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", cache) if cache else monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(deepspeed_ops.extensions_folder()) == cpp_extension.get_default_build_root()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_who_compiles_is_named_and_the_lock_of_a_killed_one_is_removed_at_once(lock):
    child, done = killed_while_it_compiles(lock), []
    start = time.monotonic()
    left = f"{lock} was left behind by process {child} of {socket.gethostname()} that has ended: removed"
    assert load(lambda: done.append(1)) == left and not lock.exists() and not done
    assert load(lambda: done.append(1)) is None and done
    assert time.monotonic() - start < 30


def test_a_lock_of_another_program_counts_while_it_works_or_may(lock):
    lock.touch()
    with lock.open():
        told = load(int, patience_s=0)
        assert told == f"DeepSpeed's operations: process {os.getpid()} compiles or loads in {lock.parent}"
    assert f"{lock} may belong to another host; waiting until it is 60 s old" in load(int, patience_s=0)
    os.utime(lock, (0, 0))
    assert load(int) == f"{lock} was left behind by a process that has ended: removed"


def test_whoever_fails_leaves_no_name(lock):
    with pytest.raises(ZeroDivisionError):
        load(lambda: 1 / 0)
    lock.touch()
    assert "may belong to another host" in load(int, patience_s=0), "torch tidied up after the one that failed"


def test_deepspeed_finds_what_a_rank_loaded_and_asks_for_no_lock(monkeypatch):
    from deepspeed.comm.torch import build_shm_op

    from rlfuse.engines.trainer.base_rank import Rank

    rank = Rank(Config(), 0, 1, "cpu")
    while rank.load_extensions() is not None:
        continue
    monkeypatch.setattr(cpp_extension, "FileBaton", None)
    assert build_shm_op() is not None


@pytest.mark.parametrize(
    ("device", "offload_optimizer", "compiled", "says"),
    [
        ("cuda", False, [], False),
        ("cuda", True, [], True),
        ("cuda", True, ["deepspeed_shm_comm"], True),
        ("cuda", True, ["cpu_adam"], False),
        ("cpu", False, [], True),
        ("cpu", False, ["deepspeed_shm_comm"], False),
    ],
)
async def test_compilation_is_reported_where_something_is_compiled(
    monkeypatch, tmp_path, device, offload_optimizer, compiled, says
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in compiled:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    said = []
    monkeypatch.setattr(deepspeed_ops.watchdog, "say", said.append)
    monkeypatch.setattr(deepspeed_ops, "call", AsyncMock(return_value=None))
    config = Config()
    config.actor.offload_optimizer = offload_optimizer
    await load_on_all_ranks([MagicMock()], config, device)
    assert [line for line in said if line.startswith("Compiling")] == (
        ["Compiling DeepSpeed's operations: about a minute, once per machine"] if says else []
    )
    assert len(said) == 2 * says


def test_operations_are_those_that_deepspeed_compiles():
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    built = {each.__name__: f"{each.NAME}.so" for each in (CPUAdamBuilder, ShareMemCommBuilder)}
    assert built == deepspeed_ops.OP_FILES
