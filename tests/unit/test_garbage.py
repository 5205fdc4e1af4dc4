"""Garbage is collected when the run says so, and before that only where memory would not stay bounded."""

import gc
import subprocess
import sys
import time
from contextlib import closing
from types import ModuleType, SimpleNamespace

import pytest

from rlfuse.cluster import garbage
from rlfuse.cluster.garbage import GarbageCollector
from rlfuse.events import Recorder, Span
from rlfuse.observe.journal import Journal
from rlfuse.observe.metrics import garbage_metrics


class Cycle:
    """What only a collection frees."""

    freed = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Cycle.freed += 1


def leave_cycles(count):
    """As garbage; how many of them are freed by now."""
    before = Cycle.freed
    for _ in range(count):
        Cycle()
    return Cycle.freed - before


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(garbage, "LOOK_S", 0.0)
    gc.unfreeze()  # modules of tests, which `pytest_collection` freezes
    made = GarbageCollector(Recorder("trainer/0"))
    yield made
    made.close()
    assert gc.isenabled() and not gc.get_freeze_count()


def found(collector):
    return [(span.cause, span.attributes["automatic"]) for span in collector._recorder.drain() if span.kind == "gc"]


@pytest.mark.slow
def test_from_the_first_planned_collection_on_there_is_no_other(collector):
    assert gc.isenabled()
    collector.collect()
    assert not gc.isenabled() and gc.get_freeze_count() > 0
    found(collector)
    assert leave_cycles(20_000) == 0, "Python collects by itself sooner"
    before = Cycle.freed
    collector.collect()
    assert Cycle.freed - before == 20_000
    assert found(collector) == [("step", 0)]


@pytest.mark.slow
def test_where_users_code_runs_python_collects_what_is_young_and_only_that(collector):
    collector._young = True
    collector.collect()
    found(collector)
    assert leave_cycles(400_000) > 300_000
    collector.collect()
    ((cause, automatic),) = found(collector)
    assert cause == "step" and automatic > 10


@pytest.mark.slow
def test_what_python_collects_by_itself_is_told(collector):
    gc.collect()
    assert leave_cycles(20_000) > 0
    assert found(collector)[0][0] == "python"
    collector.collect()
    ((cause, automatic),) = [each for each in found(collector) if each[0] != "python"]
    assert cause == "step" and automatic >= 2


@pytest.mark.slow
def test_a_process_that_has_grown_collects_between_two_pieces_of_its_work(collector, monkeypatch):
    monkeypatch.setattr(garbage, "OBJECTS", 10_000)
    collector.collect()
    recorder, before = collector._recorder, Cycle.freed
    with recorder.span("forward"):
        leave_cycles(2_000)
    assert Cycle.freed == before
    with recorder.span("forward"):
        assert leave_cycles(20_000) == 0, "not in the middle of it"
    assert Cycle.freed - before == 22_000
    *_, (cause, automatic) = found(collector)
    assert (cause, automatic) == ("memory", 0)
    memory = iter([100, 100 + garbage.GROWN_MIB, 101 + garbage.GROWN_MIB, 500, 500])
    monkeypatch.setattr(collector, "_held", lambda: next(memory))
    monkeypatch.setattr(collector, "_most_mib", 0)
    collector.collect()
    collector.collect_if_grown()
    assert found(collector) == [("step", 0)]
    collector.collect_if_grown()
    (span,) = [span for span in recorder.drain() if span.kind == "gc"]
    assert span.cause == "memory" and span.attributes["grown_mib"] == garbage.GROWN_MIB + 1
    collector.collect_if_grown()
    assert not found(collector), "what stayed is no garbage"


@pytest.mark.slow
def test_what_was_there_at_the_first_collection_can_be_let_go_of(collector):
    held, before = [Cycle() for _ in range(3)], Cycle.freed
    collector.collect()
    held.clear()
    collector.collect()
    assert Cycle.freed == before, "frozen: not looked through again"
    collector.collect_frozen()
    assert Cycle.freed == before + 3 and gc.get_freeze_count() and not gc.isenabled()


@pytest.mark.slow
def test_what_was_imported_is_not_looked_through(collector, monkeypatch):
    before = Cycle.freed
    with garbage.importing():
        monkeypatch.setitem(sys.modules, "imported", ModuleType("imported"))
        assert leave_cycles(20_000) == 0
    assert gc.isenabled()
    gc.collect()
    collector.collect_frozen()
    assert Cycle.freed == before
    collector.collect()
    collector.collect_frozen()
    assert Cycle.freed == before + 20_000


@pytest.mark.slow
def test_a_run_before_leaves_no_garbage_to_one_that_finds_all_imported(collector):
    before = Cycle.freed
    with garbage.importing():
        leave_cycles(3)
    collector.collect()
    assert Cycle.freed == before + 3


@pytest.mark.slow
def test_a_process_that_ends_early_prints_nothing_of_what_it_imported():
    """As a refusal after the libraries were loaded: nanobind reports what is not freed at exit as leaked."""
    code = "import sys; from rlfuse.cluster.garbage import importing\nwith importing(): import triton\nsys.exit(2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.slow
def test_letting_go_leaves_the_rest_to_python_where_nothing_is_planned(collector):
    collector.collect_frozen()
    assert gc.isenabled() and not gc.get_freeze_count()


class Engine:
    """Notes when it was asked to collect."""

    def __init__(self):
        self.asked = []

    async def drain(self, collect=False):
        self.asked.append((collect, time.time()))
        return [Span("gc", "trainer/0", 1.0, 1.5, cause="step")] if collect else []


@pytest.mark.slow
@pytest.mark.parametrize("gc_freq, due", [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 4]), (0, [])])
async def test_all_processes_are_asked_in_the_same_step(tmp_path, gc_freq, due):
    journal, engines = Journal(tmp_path, {}, gc_freq), [Engine(), Engine()]
    journal.faults = SimpleNamespace(update=lambda _: None)
    with closing(journal):
        journal.attach(engines)
        assert gc.isenabled() == (gc_freq == 0)
        for step in range(1, 6):
            spans = await journal.collect(step)
            own = [span for span in spans if (span.kind, span.where, span.cause) == ("gc", "driver", "step")]
            assert len(own) == (step in due)
            assert [engine.asked[-1][0] for engine in engines] == [step in due] * 2
            for span in own:
                assert all(0 <= span.start - engine.asked[-1][1] < 10 for engine in engines)
    assert gc.isenabled() and not gc.get_freeze_count()


def test_metrics_tell_seconds_and_what_was_not_planned():
    spans = [Span("gc", f"trainer/{i}", 10 + i / 4, 10.5 + i / 4, cause="step") for i in range(2)]
    assert garbage_metrics(spans) == {"timing_s/gc": 0.75, "perf/gc_unplanned": 0.0}
    spans.append(Span("gc", "rollout/0", 5.0, 6.0, cause="memory"))
    assert garbage_metrics(spans) == {"timing_s/gc": 1.75, "perf/gc_unplanned": 1.0}
    assert garbage_metrics([]) == {}
