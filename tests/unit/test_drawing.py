"""Pictures are drawn in a separate process, which may fail, hang, crash or be too slow."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest

from rlfuse.observe import drawing
from rlfuse.observe.drawing import Drawing

HERE = Path(__file__).stem


def write(path, text):
    """Write a text file in place of a picture, with the id, priority and group of the drawing process."""
    Path(path).write_text(f"{text} {os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)} {os.getpgid(0)}")


def fail():
    raise ValueError("no such colour")


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(path):
    Path(path).touch()
    time.sleep(600)


def write_memory(path):
    """Write the resident MiB after allocations typical of a picture: cyclic objects and small blocks between them."""
    figure = [[bytearray(200 + number % 900) for number in range(20_000)]]
    figure.append(figure)
    Path(path).write_text(str(psutil.Process().memory_info().rss >> 20))


@pytest.fixture
def messages():
    return []


@pytest.fixture
def pictures(messages, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    pictures = Drawing(messages.append)
    yield pictures
    pictures.close(0)


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_pictures_are_drawn_sequentially_in_another_process_and_failures_are_reported(pictures, messages, tmp_path):
    shown = []
    for number in range(2):
        pictures.submit("it", lambda n=number: shown.append(n), f"{HERE}:write", tmp_path / f"{number}", "drawn")
    pictures.submit("the third", lambda: shown.append("third"), f"{HERE}:fail")
    pictures.submit("the fourth", lambda: shown.append("fourth"), f"{HERE}:crash")
    pictures.submit("the fifth", lambda: shown.append(5), f"{HERE}:write", tmp_path / "5", "drawn")
    assert shown == [], "submit does not wait"
    pictures.close(60)
    assert shown == [0, 1, "third", "fourth", 5]
    assert messages == [
        "the third was not drawn: ValueError: no such colour",
        "the fourth was not drawn: its process ended with status -11",
    ]
    first, second, later = ((tmp_path / name).read_text().split() for name in "015")
    assert first == second != later, "one process draws until it crashes"
    process, priority, group = map(int, first[1:])
    assert priority == 19 and process == group != os.getpid() and not psutil.pid_exists(int(later[1]))


@pytest.mark.slow
def test_a_picture_that_hangs_is_cancelled_and_a_full_queue_refuses_pictures(pictures, messages, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "DRAWING_S", 1.5)
    monkeypatch.setattr(drawing, "MAX_QUEUED", 1)
    pictures.submit("one", lambda: None, f"{HERE}:hang", tmp_path / "begun")
    pictures.submit("two", lambda: None, f"{HERE}:fail")
    wait_for(lambda: not pictures._requests or pictures.report_finished())
    assert messages == ["one was not drawn: it took 1.5 s", "two was not drawn: 1 others are queued; draw less often"]


@pytest.mark.slow
def test_closing_waits_no_longer_than_its_timeout(pictures, messages, tmp_path):
    pictures.submit("one", lambda: None, f"{HERE}:hang", tmp_path / "begun")
    pictures.submit("two", lambda: messages.append("tried"), f"{HERE}:write", tmp_path / "2", "drawn")
    wait_for((tmp_path / "begun").exists)
    began = time.monotonic()
    pictures.close(0.1)
    assert time.monotonic() - began < 60 and not (tmp_path / "2").exists()
    assert messages == ["one was not drawn: the run ended first", "two was not drawn: the run ended first", "tried"]


@pytest.mark.slow
def test_an_interrupt_while_closing_cancels_pictures(pictures, messages, tmp_path):
    pictures.submit("one", lambda: None, f"{HERE}:hang", tmp_path / "begun")
    pictures.submit("two", lambda: None, f"{HERE}:hang", tmp_path / "begun")
    wait_for((tmp_path / "begun").exists)
    interrupt = Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        pictures.close(60)
    assert pictures._process.poll() is not None
    wait_for(
        lambda: not any(thread.is_alive() for thread in pictures._thread._threads)
    )  # Python joins this thread at exit


@pytest.mark.slow
def test_the_drawing_process_ends_with_a_killed_run_but_ignores_terminal_signals(tmp_path):
    script = (
        "import sys; from rlfuse.observe.drawing import Drawing\n"
        f"pictures = Drawing(print); pictures.submit('it', print, '{HERE}:hang', '{tmp_path}/begun'); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{Path.cwd()}"}
    command = [sys.executable, "-c", script]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    wait_for((tmp_path / "begun").exists)
    [process] = psutil.Process(run.pid).children()
    process.send_signal(signal.SIGTERM)
    assert os.getpgid(process.pid) != run.pid and process.is_running()
    run.kill()
    run.wait()
    process.wait(60)


@pytest.mark.slow
def test_memory_of_the_drawing_process_does_not_grow(pictures, tmp_path):
    def draw(number):
        pictures.submit("memory", lambda: None, f"{HERE}:write_memory", tmp_path / str(number))
        wait_for((tmp_path / str(number)).exists)

    for number in range(8):
        draw(number)
        pictures.report_finished()
    assert int((tmp_path / "7").read_text()) < int((tmp_path / "1").read_text()) + 8
