"""The live view: what it tells of a step under way, how it is drawn, and that it keeps quiet where nobody looks on."""

import io
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlfuse.config.schema import Config
from rlfuse.fusion.decisions import Slot
from rlfuse.fusion.ledger import Ledger
from rlfuse.observe.events import Recorder
from rlfuse.observe.live import Stage, View, clock, look, render, sparkline
from rlfuse.observe.terminal import Terminal


def sample(response=None, reward=None, *tensors):
    return SimpleNamespace(response=response, reward=reward, tensors=dict.fromkeys(tensors))


@pytest.fixture
def board():
    ledger = Ledger(2)
    ledger.divide({0: 0, 1: 1}, [1, 1], [5.0, 5.0])
    ledger.step()
    slots = [Slot(0, arriving=3), Slot(1, "trainer"), Slot(2, "trainer"), Slot(3, alive=False), Slot(4)]
    samples = {"a": sample("r", 1.0, "old_log_probs"), "b": sample("r", 0.5), "c": sample()}
    fleet = SimpleNamespace(slots=slots, flying=3)
    return SimpleNamespace(samples=samples, kinds=("reward", "old_log_prob"), ledgers={"actor": ledger}, fleet=fleet)


def test_a_step_under_way(board):
    recorder = Recorder("driver")
    assert look(board, recorder.open.values()) == ("between steps", [], [], 0)
    with recorder.span("step"), recorder.span("gen", attributes={"slot": 0}), ExitStack() as others:
        for kind, slot in (("old_log_prob", 1), ("switch", 2)):
            others.enter_context(recorder.span(kind, attributes={"slot": slot}))
        phase, stages, slots, in_flight = look(board, recorder.open.values())
    assert phase == "training step" and in_flight == 3
    assert stages == [
        Stage("generate", 2, 3), Stage("reward", 2, 3), Stage("old_log_prob", 1, 3), Stage("train actor", 1, 4)
    ]  # fmt: skip
    assert slots == [("generate", 3), ("old_log_prob", 0), ("switch", 0), ("lost", 0), ("idle", 0)]
    with recorder.span("step"), recorder.span("update_actor"):
        assert look(board, recorder.open.values())[2][4] == ("train actor", 0), "all ranks together"
    assert not recorder.open


def drawn(view, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(view))
    return console.file.getvalue()


def test_everything_is_drawn_in_a_narrow_terminal_too():
    stages = [Stage("generate", 96, 128), Stage("train actor", 0, 2)]
    slots = [("generate", 20), ("old_log_prob", 0)]
    figures = {"reward": "0.812", "speed": "980"}
    view = View("my[run]", 9, 16, 130, 3700.0, "training step", stages, slots, 20, [0.1, 0.5, 0.8], figures)
    for text in (drawn(view), drawn(view, 80)):
        for part in ("my[run]", "step 9/16", "2:10 gone, about 1:01:40 left", "96/128", "20 samples in flight",
                     "slot 1", "old_log_prob", "▁▅█", "reward 0.812"):  # fmt: skip
            assert part in text
    many = drawn(
        View("x", 0, 1, 0, None, "training step", stages, [("generate", 2)] * 60 + [("idle", 0)] * 4, 9, [], {})
    )
    assert "60 slots generate" in many and "4 slots  idle" in many and "left" not in many


def test_clock_and_sparkline():
    assert [clock(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert sparkline([1.0, 1.0]) == "▄▄" and sparkline([0, 1], width=1) == "▄" and sparkline([0, 1, 0.5]) == "▁█▅"


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    made = []

    def make(tty):
        console = Console(file=io.StringIO(), force_terminal=tty, width=100)
        made.append(Terminal(Config(), 4, 0, Recorder("driver"), console))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_where_nobody_looks_on_there_is_one_line_a_step(terminal, capsys):
    quiet = terminal(False)
    quiet.log(1, {"critic/score/mean": 0.5, "response_length/mean": 20.2, "perf/time_per_step": 2.0})
    quiet.say("a line")
    quiet.close()
    assert capsys.readouterr().out == "step 1/4  reward 0.500  kl -  length 20/-  speed -  2.0 s\n"
    assert quiet.console.file.getvalue() == "a line\n"


def test_at_a_terminal_the_view_is_drawn_and_lines_stand_above(terminal, capsys, board):
    watched = terminal(True)
    watched.board = board
    with watched._recorder.span("step"):
        watched.log(1, {"critic/score/mean": 0.5, "perf/time_per_step": 2.0})
        watched.say("a line")
        view = watched.view()
        watched.close()
    assert view.step == 1 and 0 < view.left_s <= 6 and view.stages[0] == Stage("generate", 2, 3)
    text = watched.console.file.getvalue()
    assert text.index("a line") < text.rindex("step 1/4") and "generate" in text
    assert capsys.readouterr().out == ""


def test_ci_is_quiet(terminal, monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert terminal(True)._live is None
