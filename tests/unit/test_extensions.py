"""Locks of compiled extensions: wait for running processes, and remove locks of ended processes immediately."""

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
    """Return the path of torch's lock, which does not exist yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    return tmp_path / "deepspeed_shm_comm" / "lock"


def kill_during_compilation(lock):
    """Kill a child process while it compiles, and return its process id."""
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
def test_operations_are_in_the_extensions_folder_of_torch(monkeypatch, cache):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", cache) if cache else monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(deepspeed_ops.extensions_folder()) == cpp_extension.get_default_build_root()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_the_lock_of_a_killed_process_is_removed_immediately(lock):
    child, done = kill_during_compilation(lock), []
    start = time.monotonic()
    message = f"{lock} was left behind by process {child} of {socket.gethostname()} that has ended: removed"
    assert load(lambda: done.append(1)) == message and not lock.exists() and not done
    assert load(lambda: done.append(1)) is None and done
    assert time.monotonic() - start < 30


def test_a_lock_without_known_owner_is_respected_while_it_may_be_held(lock):
    lock.touch()
    with lock.open():
        message = load(int, patience_s=0)
        assert message == f"DeepSpeed's operations: process {os.getpid()} compiles or loads in {lock.parent}"
    assert f"{lock} may belong to another host; waiting until it is 60 s old" in load(int, patience_s=0)
    os.utime(lock, (0, 0))
    assert load(int) == f"{lock} was left behind by a process that has ended: removed"


def test_a_failed_load_records_no_owner(lock):
    with pytest.raises(ZeroDivisionError):
        load(lambda: 1 / 0)
    lock.touch()
    assert "may belong to another host" in load(int, patience_s=0), "the failed process removed its record"


def test_deepspeed_uses_loaded_operations_without_a_lock(monkeypatch):
    from deepspeed.comm.torch import build_shm_op

    from rlfuse.engines.trainer.base_rank import Rank

    rank = Rank(Config(), 0, 1, "cpu")
    while rank.load_extensions() is not None:
        continue
    monkeypatch.setattr(cpp_extension, "FileBaton", None)
    assert build_shm_op() is not None


@pytest.mark.parametrize(
    ("device", "offload_optimizer", "compiled", "is_reported"),
    [
        ("cuda", False, [], False),
        ("cuda", True, [], True),
        ("cuda", True, ["deepspeed_shm_comm"], True),
        ("cuda", True, ["cpu_adam"], False),
        ("cpu", False, [], True),
        ("cpu", False, ["deepspeed_shm_comm"], False),
    ],
)
async def test_compilation_is_reported_if_something_is_compiled(
    monkeypatch, tmp_path, device, offload_optimizer, compiled, is_reported
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in compiled:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    messages = []
    monkeypatch.setattr(deepspeed_ops.watchdog, "say", messages.append)
    monkeypatch.setattr(deepspeed_ops, "call", AsyncMock(return_value=None))
    config = Config()
    config.actor.offload_optimizer = offload_optimizer
    await load_on_all_ranks([MagicMock()], config, device)
    assert [line for line in messages if line.startswith("Compiling")] == (
        ["Compiling DeepSpeed's operations: about a minute, once per machine"] if is_reported else []
    )
    assert len(messages) == 2 * is_reported


def test_operations_match_the_builders_of_deepspeed():
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    built = {each.__name__: f"{each.NAME}.so" for each in (CPUAdamBuilder, ShareMemCommBuilder)}
    assert built == deepspeed_ops.OP_FILES
