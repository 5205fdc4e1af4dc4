"""Video decoding in worker processes: files that hang or crash, limits in clips and bytes, and cleanup."""

import errno
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import psutil
import pytest
from clip_files import numbers, plan_of, steady, write_video

from rlfuse.cluster import scratch
from rlfuse.cluster.child_processes import POOL_WORKER
from rlfuse.errors import EngineError, VideoError
from rlfuse.video import decode_pool, decoding
from rlfuse.video.decode_pool import Clip, DecodePool

LOCKS = """
import sys, time
from rlfuse.cluster.child_processes import PoolContext

def hold(lock, pipe):
    with_timeout = lock.acquire(timeout=5)
    lock.acquire()  # again, in the same thread
    pipe.send(with_timeout)
    time.sleep(60)

if __name__ == "__main__":
    context = PoolContext()
    lock, (here, there) = context.RLock(), context.Pipe()
    process = context.Process(target=hold, args=(lock, there))
    process.start()
    held = here.recv(), lock.acquire(timeout=0.1), lock.acquire(block=False)
    process.kill()
    print(held, lock.acquire(timeout=5))
"""
PLAN = plan_of(steady(6, 2))
BYTES = 6 * 28 * 224 * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    write_video(folder / "good.mp4", steady(30))
    os.mkfifo(folder / "silent.mp4")
    (folder / "text.mp4").write_text("no video")
    return folder


@pytest.fixture(scope="module")
def good(folder):
    return str(folder / "good.mp4")


@pytest.fixture(scope="module")
def pool():
    with DecodePool(workers=2, timeout_s=3.0) as pool:
        yield pool


def opened_by_its_reader(pipe: Path) -> int:
    """Return a descriptor to write to the pipe, once a decoder has opened it for reading."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            time.sleep(0.01)
    raise TimeoutError(f"no process opened {pipe}")


@pytest.mark.slow
def test_results_are_in_order_and_equal_those_of_this_process(pool, good):
    assert list(pool.probe([good] * 2)) == [decoding.probe(good)] * 2
    clips = [Clip(good, PLAN, first) for first in (0, 3, 1, 5, 2, 4)]
    list(pool.stream(clips))
    open_before = len(os.listdir("/proc/self/fd"))
    for clip, frames in zip(clips, pool.stream(clips), strict=True):
        assert numbers(frames) == [0, 5, 10, 15, 20, 25][clip.first :]
    del frames  # its memory mapping has a descriptor
    assert len(os.listdir("/proc/self/fd")) == open_before
    whole = decoding.decode(good, PLAN)
    assert np.array_equal(pool.decode(good, PLAN, 2, 5), whole[2:5])


@pytest.mark.slow
def test_a_file_that_hangs_or_is_invalid_fails_only_its_sample(pool, folder, good):
    names = ["good", "silent", "good", "text", "gone", "good"]
    clips = [Clip(str(folder / f"{name}.mp4"), PLAN, sample=f"7/{i}/0") for i, name in enumerate(names)]
    results = list(pool.stream(clips))
    for place in (0, 2, 5):
        assert numbers(results[place]) == [0, 5, 10, 15, 20, 25]
    for place, problem in ((1, "took longer than 3 s"), (3, "can't be read as a video"), (4, "does not exist")):
        assert isinstance(results[place], VideoError)
        assert str(results[place]).startswith(f"{clips[place].path} (sample 7/{place}/0): {problem}")
    assert isinstance(next(pool.probe([str(folder / "text.mp4")])), VideoError)
    with pytest.raises(VideoError, match="does not exist"):
        pool.decode(str(folder / "gone.mp4"), PLAN)


@pytest.mark.slow
def test_a_decoder_crash_fails_only_its_sample(tmp_path, good):
    os.mkfifo(tmp_path / "crash.mp4")
    others = set(psutil.Process().children(recursive=True))
    with DecodePool(timeout_s=60.0) as pool:
        clips = [Clip(good, PLAN), Clip(str(tmp_path / "crash.mp4"), PLAN), Clip(good, PLAN)]
        results = pool.stream(clips)
        assert numbers(next(results))[-1] == 25
        writer = opened_by_its_reader(tmp_path / "crash.mp4")
        for worker in set(psutil.Process().children(recursive=True)) - others:
            if "spawn_main" in " ".join(worker.cmdline()):
                worker.send_signal(signal.SIGSEGV)
        assert "crashed its decoder (exit code -11)" in str(next(results))
        os.close(writer)
        assert numbers(next(results))[-1] == 25


def signal_workers(number):
    """Send a signal to all workers of this process and return their number."""
    workers = [each for each in multiprocessing.active_children() if each.name == POOL_WORKER]
    for worker in workers:
        os.kill(worker.pid, number)
    return len(workers)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_workers_are_replaced_without_failing_a_file(good, number):
    """Signal workers both while they decode and while they are idle."""
    with DecodePool(workers=1, timeout_s=60.0) as pool:
        for done, frames in enumerate(pool.stream([Clip(good, PLAN)] * 6)):
            assert numbers(frames) == [0, 5, 10, 15, 20, 25]
            if done == 1:
                assert signal_workers(number)
        assert signal_workers(number)
        time.sleep(0.5)
        assert numbers(pool.decode(good, PLAN))[-1] == 25
        assert list(pool.probe([good])) == [decoding.probe(good)]


@pytest.mark.slow
def test_a_file_whose_decoder_is_killed_each_time_fails_its_sample(tmp_path, good, monkeypatch):
    os.mkfifo(tmp_path / "large.mp4")
    monkeypatch.setattr(decode_pool, "ATTEMPTS", 2)
    with DecodePool(timeout_s=60.0) as pool, ThreadPoolExecutor(1) as thread:
        results = thread.submit(lambda: list(pool.stream([Clip(str(tmp_path / "large.mp4"), PLAN), Clip(good, PLAN)])))
        for _ in range(2):
            writer = opened_by_its_reader(tmp_path / "large.mp4")
            signal_workers(signal.SIGKILL)
            os.close(writer)
            time.sleep(0.5)
        lost, whole = results.result(60)
    assert "lost its decoder 2 times (exit code -9)" in str(lost) and numbers(whole)[-1] == 25


def test_a_broken_pool_fails_a_sample_whose_decoder_was_lost_earlier(good):
    """Reproduce a worker that is killed before pebble has registered its task."""

    def broken(exit_code):
        future = Future()
        future.set_exception(BrokenProcessPool("All workers expired"))
        return decode_pool._Call(decode_pool._Request(good), future, attempt=decode_pool.ATTEMPTS, exit_code=exit_code)

    with DecodePool() as pool:
        assert "lost its decoder 3 times (exit code -9)" in str(pool._result(broken(-9)))
        with pytest.raises(EngineError, match="the decode workers failed: All workers expired"):
            pool._result(broken(None))


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "value", "most"), [("max_bytes", 2 * BYTES, 2), ("max_clips", 3, 3)])
def test_a_slow_consumer_pauses_the_decoders(pool, good, monkeypatch, bound, value, most):
    monkeypatch.setattr(pool, bound, value)
    taken = 0

    def clips():
        nonlocal taken
        for _ in range(8):
            taken += 1
            yield Clip(good, PLAN)

    for done, frames in enumerate(pool.stream(clips())):
        assert frames.nbytes == BYTES
        assert taken <= done + most + 1  # one more is read and waits for space


@pytest.mark.slow
def test_a_clip_larger_than_the_limit_is_an_error(pool, good, monkeypatch):
    monkeypatch.setattr(pool, "max_bytes", BYTES - 1)
    error, part = pool.stream([Clip(good, PLAN), Clip(good, PLAN, 1)])
    assert f"{BYTES} bytes (6 x 28 x 224 x 3), but the pool's limit is {BYTES - 1}" in str(error)
    assert len(part) == 5


@pytest.mark.slow
def test_a_pool_is_pickled_as_its_settings(pool, good):
    assert list(pool.probe([good]))
    unpickled = pickle.loads(pickle.dumps(pool))
    assert (unpickled.workers, unpickled.timeout_s) == (2, 3.0)
    assert numbers(unpickled.decode(good, PLAN))[1] == 5
    unpickled.close()
    unpickled.close()


@pytest.mark.slow
def test_closing_a_stream_leaves_the_pool_usable(pool, folder, good):
    stream = pool.stream([Clip(good, PLAN), Clip(str(folder / "silent.mp4"), PLAN)])
    next(stream)
    stream.close()
    assert numbers(pool.decode(good, PLAN))[1] == 5


@pytest.mark.slow
def test_workers_that_cannot_start_are_an_engine_error(good, monkeypatch):
    resource_tracker.ensure_running()  # started with this interpreter, not with that of the workers
    monkeypatch.setattr(decode_pool, "START_S", 1.0)
    python = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable("/bin/false")
    try:
        with (
            DecodePool(timeout_s=1.0) as pool,
            pytest.raises(EngineError, match="decode worker"),
        ):
            pool.decode(good, PLAN)
    finally:
        multiprocessing.set_executable(python)


@pytest.mark.slow
def test_workers_do_not_import_large_libraries():
    """Check that new worker processes do not import torch, which would dominate their start time and memory."""
    code = "import sys, rlfuse.video.decode_pool; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_workers_end_with_a_killed_parent_while_decoding(tmp_path):
    os.mkfifo(tmp_path / "silent.mp4")
    program = f"""
        from rlfuse.video.decode_pool import DecodePool
        if __name__ == "__main__":
            list(DecodePool(timeout_s=60.0).probe([{str(tmp_path / "silent.mp4")!r}]))
    """
    (tmp_path / "parent.py").write_text(textwrap.dedent(program))
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"])
    writer = opened_by_its_reader(tmp_path / "silent.mp4")
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    os.close(writer)
    assert children and not alive


@pytest.mark.parametrize("setting", ["workers", "timeout_s", "max_clips", "max_bytes"])
def test_settings_are_checked(setting):
    with pytest.raises(ValueError, match=rf"DecodePool.{setting}: got 0; it must be positive"):
        DecodePool(**{setting: 0})


@pytest.mark.slow
def test_pool_locks_are_released_if_their_process_is_killed(good, tmp_path):
    before = scratch.held_by([psutil.Process()])
    with DecodePool() as pool:
        list(pool.probe([good]))
        assert scratch.held_by([psutil.Process(), *psutil.Process().children(recursive=True)]) <= before
    (script := tmp_path / "locks.py").write_text(LOCKS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "(True, False, False) True\n", done.stderr
