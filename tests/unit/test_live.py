"""Live view: the state of a running step, its rendering, and plain log lines outside of interactive terminals."""

import io
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from rlfuse.config.schema import Config
from rlfuse.events import Recorder
from rlfuse.fusion.decisions import Slot
from rlfuse.fusion.mini_batches import MiniBatchProgress
from rlfuse.observe.live import Stage, View, clock, read_board, render, sparkline
from rlfuse.observe.terminal import FILE, Terminal, step_line
from rlfuse.progress import part
from rlfuse.tools.watch import read_view


def sample(response=None, reward=None, *tensors):
    return SimpleNamespace(response=response, reward=reward, tensors=dict.fromkeys(tensors), is_baseline=False)


@pytest.fixture
def board():
    progress = MiniBatchProgress(2)
    progress.set_mini_batches({0: 0, 1: 1}, [1, 1], [5.0, 5.0])
    progress.step()
    slots = [Slot(0, arriving=3), Slot(1, "trainer"), Slot(2, "trainer"), Slot(3, alive=False), Slot(4)]
    samples = {"a": sample("r", 1.0, "old_log_probs"), "b": sample("r", 0.5), "c": sample(),
               "skipped": sample("r", 1.0), "failed": sample("r", 0.0), "replaced": sample("r", 1.0)}  # fmt: skip
    return SimpleNamespace(
        samples=samples,
        records={
            name: SimpleNamespace(
                sample=each,
                trains=name != "failed",
                skipped=name == "skipped",
                group=SimpleNamespace(chosen=name != "replaced"),
            )
            for name, each in samples.items()
        },
        kinds=("reward", "old_log_prob"),
        mini_batches={"actor": progress},
        slot_table=SimpleNamespace(slots=slots, in_flight=3),
    )


def test_state_of_a_running_step(board):
    recorder = Recorder("driver")
    assert read_board(board, recorder.open.values()) == ("between steps", [], [], 0)
    with recorder.span("step"), recorder.span("gen", attributes={"slot": 0}), ExitStack() as others:
        for kind, slot in (("old_log_prob", 1), ("switch", 2)):
            others.enter_context(recorder.span(kind, attributes={"slot": slot}))
        phase, stages, slots, in_flight = read_board(board, recorder.open.values())
    assert phase == "training step" and in_flight == 3
    assert stages == [
        Stage("generate", 5, 6), Stage("reward", 5, 6), Stage("old_log_prob", 2, 4), Stage("train actor", 1, 4)
    ]  # fmt: skip
    assert slots == [("generate", 3), ("old_log_prob", 0), ("switch", 0), ("lost", 0), ("idle", 0)]
    with recorder.span("step"), recorder.span("update_actor"):
        assert read_board(board, recorder.open.values())[2][4] == ("train actor", 0), "an update runs on all ranks"
    assert not recorder.open


def drawn(view, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(view))
    return console.file.getvalue()


def test_view_fits_a_narrow_terminal():
    stages = [Stage("generate", 96, 128), Stage("train actor", 0, 2)]
    slots = [("generate", 20), ("old_log_prob", 0)]
    figures = {"reward": "0.812", "speed": "980"}
    view = View("my[run]", 9, 16, 130, 3700.0, "training step", stages, slots, 20, [0.1, 0.5, 0.8], figures)
    for text in (drawn(view), drawn(view, 80)):
        for shown in ("my[run]", "step 9/16", "2:10 elapsed, about 1:01:40 left", "96/128", "20 samples in flight",
                     "slot 1", "old_log_prob", "▁▅█", "reward 0.812"):  # fmt: skip
            assert shown in text
    many = drawn(
        View("x", 0, 1, 0, None, "training step", stages, [("generate", 2)] * 60 + [("idle", 0)] * 4, 9, [], {})
    )
    assert "60 slots generate" in many and "4 slots  idle" in many and "left" not in many


def test_clock_and_sparkline():
    assert [clock(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert sparkline([1.0, 1.0]) == "▄▄" and sparkline([0, 1], width=1) == "▄" and sparkline([0, 1, 0.5]) == "▁█▅"


@pytest.fixture
def terminal(monkeypatch, tmp_path):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminals = []

    def make(tty):
        console = Console(file=io.StringIO(), force_terminal=tty, width=100)
        terminals.append(Terminal(Config(), 4, 0, Recorder("driver"), tmp_path, console))
        return terminals[-1]

    yield make
    for each in terminals:
        each.close()


ROW = {
    "critic/score/mean": 0.5, "actor/ppo_kl": 0.00124, "actor/entropy": 1.5, "response_length/mean": 20.2,
    "response_length/max": 64.0, "perf/throughput": 1234.5, "perf/time_per_step": 2.0, "val-core/sums/acc": 0.75,
}  # fmt: skip
LINE = (
    "step 1/4  reward 0.500  kl of update 0.0012  entropy 1.500  length 20 tokens (max 64)  "
    "speed 1,234 tokens/s per slot  held out 0.750  2.0 s\n"
)


def test_non_interactive_output_is_one_line_per_step(terminal):
    quiet = terminal(False)
    quiet.log(1, ROW)
    quiet.say("a line")
    quiet.close()
    assert quiet.console.file.getvalue() == LINE + "a line\n"
    assert step_line(1, 4, {"perf/time_per_step": 2.0}) == (
        "step 1/4  reward -  length - tokens (max -)  speed - tokens/s per slot  2.0 s"
    )


def test_terminal_shows_the_view_below_printed_lines(terminal, board):
    watched = terminal(True)
    watched.board = board
    with watched._recorder.span("step"):
        watched.log(1, ROW)
        watched.say("a line")
        view = watched.view()
        watched.close()
    assert view.step == 1 and 0 < view.remaining_s <= 6 and view.stages[0] == Stage("generate", 5, 6)
    assert view.figures["held out"] == "0.750 (step 1)"
    text = watched.console.file.getvalue()
    assert text.index(LINE.strip()[:60]) < text.index("a line") < text.rindex("step 1/4") and "generate" in text


def test_logs_report_progress_during_long_operations(terminal, monkeypatch, board):
    monkeypatch.setattr("rlfuse.observe.terminal.SILENT_S", 0.0)
    monkeypatch.setattr("rlfuse.observe.terminal.REFRESH_S", 0.01)
    monkeypatch.setattr("rlfuse.observe.terminal.MAX_CPU_SHARE", 1.0)
    quiet = terminal(False)
    output = quiet.console.file.getvalue
    with quiet._recorder.span("start", cause="run"), quiet._recorder.span("start", cause="engine 1 of 2"):
        assert soon(lambda: re.search(r"… starting, 0:\d\d elapsed: engine 1 of 2 \d+ s\n", output()))
    quiet.board = board
    with quiet._recorder.span("step"):
        assert soon(lambda: re.search(r"… training step, 0:\d\d elapsed: generate 5/6, reward 5/6, ", output()))


def soon(condition):
    until = time.monotonic() + 60
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return holds


def test_other_processes_can_read_the_view(terminal, tmp_path, board):
    quiet = terminal(False)
    quiet.board = board
    with quiet._recorder.span("step"), quiet._recorder.span("start", cause="an engine"):
        quiet.log(1, ROW)
        quiet._publish()
        at, view = read_view(tmp_path / FILE)
        assert abs(at - time.time()) < 60
        assert drawn(view) == drawn(replace(quiet.view(), elapsed_s=view.elapsed_s, remaining_s=view.remaining_s))
    assert "… an engine" in drawn(view)


@pytest.mark.parametrize(("tty", "term", "ci"), [(True, "xterm", "true"), (True, "dumb", None), (False, "xterm", None)])
def test_view_is_only_drawn_in_interactive_terminals(terminal, monkeypatch, tty, term, ci):
    monkeypatch.setenv("TERM", term)
    if ci:
        monkeypatch.setenv("CI", ci)
    assert terminal(tty)._live is None


def test_progress_of_parts_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("rlfuse.progress.SILENT_S", 0.01)
    shown = []
    with part("rows"):
        assert soon(lambda: shown.append(capsys.readouterr().out) or "so far" in "".join(shown))
    first, *_, last = "".join([*shown, capsys.readouterr().out]).splitlines()
    assert re.fullmatch(r"… rows: \d+ s so far", first) and re.fullmatch(r"✓ rows  \d+\.\d s", last)
    with pytest.raises(OSError, match="gone"), part("rows"):
        raise OSError("gone")
    assert "✓" not in capsys.readouterr().out


def test_numpy_numbers_are_written_to_the_view_file(tmp_path):
    terminal = Terminal(Config(), 4, 0, Recorder("driver"), tmp_path, Console(quiet=True))
    terminal.log(1, {"reward_model/acc": np.float32(0.5)})
    terminal.close()
    assert read_view(tmp_path / FILE)[1].rewards == [0.5]
