"""The lock on a run folder: one driver at a time, independent of clocks and process ids."""

import asyncio
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rlfuse.config.schema import Config
from rlfuse.errors import RunError
from rlfuse.observe.journal import Journal
from rlfuse.run.job import Job, record_final_status
from rlfuse.run.resume.acceptance import _is_running
from rlfuse.run_folder import run_lock, status
from rlfuse.run_folder.run_lock import RunLock

DRIVER = """
import pathlib, sys, time
from rlfuse.run_folder.run_lock import RunLock
lock = RunLock()
assert lock.acquire(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lock():
    lock = RunLock()
    yield lock
    lock.release()


@pytest.fixture
def quick(monkeypatch):
    """Make heartbeats 20x faster."""
    for name in ("BEAT_S", "SILENT_S", "PROBED_S"):
        monkeypatch.setattr(run_lock, name, getattr(run_lock, name) / 20)


@pytest.fixture
def no_flock(monkeypatch, quick):
    """Simulate a file system without locks."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def running(tmp_path):
    """Return the folder of a driver that ended or is not visible."""
    status.begin(tmp_path, "project/name", time.time())
    return tmp_path


def another_kernel(folder, **more):
    content = {"id": "other", "boot": "another", "host": "elsewhere", "pid": 1} | more
    (folder / run_lock.FILE).write_text(json.dumps(content))


def state(folder):
    return status.state_now(folder, status.read(folder))


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"pid": 1}, {"started": 1e12}, {"started": 0.0}])
def test_the_state_of_a_run_is_independent_of_process_ids_and_clocks(running, lock, change, quick):
    # In another container the holder has another process id, and the clock may have been changed since.
    lock.acquire(running)
    status._write(running, replace(status.read(running), **change))
    assert state(running) == "running" and not RunLock().acquire(running)
    lock.release()
    assert state(running) == "crashed" and (running / run_lock.FILE).read_bytes() == b"", "other hosts need not wait"
    assert lock.acquire(running)


@pytest.mark.slow
def test_a_killed_driver_releases_its_lock_despite_forked_children(running):
    program = DRIVER.replace("time.sleep", "import os; os.fork(); time.sleep")
    driver = subprocess.Popen([sys.executable, "-c", program, running], stdout=subprocess.PIPE, process_group=0)
    assert driver.stdout.readline() == b"held\n" and state(running) == "running"
    driver.kill()  # its child survives
    os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)
    assert state(running) == "crashed" and run_lock.is_locked(running) is False
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def test_commands_that_read_the_lock_do_not_block_a_driver(tmp_path, lock):
    # They hold the lock briefly.
    (tmp_path / run_lock.FILE).touch()
    with (tmp_path / run_lock.FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        assert lock.acquire(tmp_path)


@contextmanager
def written_repeatedly(path):
    """Write to this file repeatedly, as a driver on another host."""
    ended = threading.Event()

    def write():
        while not ended.wait(0.02):
            os.utime(path)

    path.touch()
    writer = threading.Thread(target=write)
    writer.start()
    yield
    ended.set()
    writer.join()


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["no flock", "another kernel"])
@pytest.mark.parametrize("file", ["driver.lock", "live.json", "metrics.jsonl"])
def test_recent_writes_decide_when_the_lock_is_inconclusive(running, request, lock, file, seen):
    # Runs in real time: it fails if the heartbeat thread gets no CPU for a second.
    request.getfixturevalue("no_flock" if seen == "no flock" else "quick")
    another_kernel(running)
    with written_repeatedly(running / file):
        assert run_lock.is_locked(running) is None and state(running) == "running"
        assert _is_running(running) and not lock.acquire(running)
    assert run_lock._content(os.open(running / run_lock.FILE, os.O_RDONLY))["id"] == "other"
    assert not _is_running(running) and state(running) == "crashed" and lock.acquire(running)
    time.sleep(3 * run_lock.SILENT_S)
    assert state(running) == "running", "its heartbeats"


def test_old_files_are_not_watched(running, monkeypatch):
    monkeypatch.setattr(time, "sleep", pytest.fail)
    another_kernel(running)
    for path in running.iterdir():
        os.utime(path, (time.time() - 2 * run_lock.STALE_S,) * 2)
    assert not run_lock.is_written(running) and state(running) == "crashed"
    status._write(running, replace(status.read(running), host="elsewhere"))
    for path in running.iterdir():
        os.utime(path, (time.time() - 2 * run_lock.STALE_S,) * 2)
    assert state(running) == "running", "the list shows when another host last wrote"


@pytest.mark.parametrize("loss", ["removed", "replaced", "taken over"])
def test_a_run_whose_folder_is_lost_ends_with_a_message(tmp_path, lock, loss):
    folder, message = tmp_path / "run", "taken over by process 1" if loss == "taken over" else "was removed or replaced"
    folder.mkdir()
    job = Job(Config(), folder, None, {"step": 0}, 1.0, lock=lock)
    with pytest.raises(RunError, match=message), record_final_status(job):
        lock.acquire(folder)
        status.begin(folder, "project/name", 1.0)
        journal = Journal(folder, Counter(), check_folder=lock.check)
        asyncio.run(journal.collect(1))
        status_before = status.read(folder) if loss == "taken over" else shutil.rmtree(folder)
        if loss != "removed":
            folder.mkdir(exist_ok=True)
            another_kernel(folder)
        with pytest.raises(RunError, match=message):
            asyncio.run(journal.collect(2))
        journal.close()
        raise FileNotFoundError(2, "No such file or directory", str(folder / "live.json"))
    assert status.read(folder) == status_before and not lock.is_held
