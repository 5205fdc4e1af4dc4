"""The watchdog reports last events and stacks of the processes of a run, including hung and stopped ones."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlfuse.cluster import watchdog
from rlfuse.events import Recorder

HANGS = """
import time
from rlfuse.cluster import watchdog
from rlfuse.events import Recorder

recorder = Recorder("trainer/7")
watchdog.register("trainer/7", recorder)
with recorder.span("forward"):
    pass
with recorder.span("backward"):
    print("hangs", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hung(tmp_path):
    """Yield (watchdog of the driver, hung process, printed lines)."""
    lines = []
    with watchdog.watching(tmp_path, Recorder("driver"), lines.append) as dog:
        process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.DEVNULL)
        log = tmp_path / "logs" / "trainer-7.log"
        while not (log.is_file() and log.read_text().endswith("hangs\n")):
            assert process.poll() is None
            time.sleep(0.01)
        yield dog, process, lines
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_a_long_wait_shows_the_stack_of_the_worker(hung, tmp_path):
    _, process, lines = hung
    with watchdog.waiting("trainer/7", "step", 0.1):
        while not lines:
            await asyncio.sleep(0.01)
    assert "trainer/7 has taken 0.05 s of 0.1" in lines[0] and "began backward" in lines[0]
    text = next((tmp_path / "stacks").glob("*.txt")).read_text()
    assert text.index("== trainer/7 (process ") < text.index("== driver") and "line 12 in <module>" in text
    assert "test_a_long_wait_shows_the_stack_of_the_worker" in text.partition("== driver")[2]
    assert "line 12 in <module>" in await watchdog.stack_of("trainer/7")
    (stopped := psutil.Process(process.pid)).suspend()
    while stopped.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    assert "the process is stopped" in watchdog.evidence("trainer/7")
    assert watchdog.is_stopped("trainer/7") and not watchdog.is_stopped("trainer/8")
    assert await watchdog.stack_of("trainer/8") == ""


def test_sigusr1_dumps_all_running_processes(hung, tmp_path):
    dog, process, lines = hung
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0)
    assert lines[0].startswith(f"SIGUSR1: {tmp_path}/stacks/")
    process.kill()
    process.wait()
    assert "trainer/7" not in dog.evidence("driver")


def test_a_run_without_a_dump_leaves_no_files(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with watchdog.watching(tmp_path, Recorder("driver"), print):
        assert (tmp_path / "stacks").is_dir() and watchdog.environment()
    assert not any(tmp_path.iterdir()) and not watchdog.environment()
    assert signal.getsignal(signal.SIGUSR1) is before and watchdog.evidence("trainer/0") == ""
