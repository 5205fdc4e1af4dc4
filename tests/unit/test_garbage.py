"""Garbage collection at planned steps, and earlier only to keep memory bounded."""

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
    """Reference cycle that only the garbage collector frees."""

    freed = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Cycle.freed += 1


def create_cycles(count):
    """Create `count` unreachable cycles; return how many were freed meanwhile."""
    before = Cycle.freed
    for _ in range(count):
        Cycle()
    return Cycle.freed - before


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(garbage, "LOOK_S", 0.0)
    gc.unfreeze()  # test modules, which `pytest_collection` freezes
    instance = GarbageCollector(Recorder("trainer/0"))
    yield instance
    instance.close()
    assert gc.isenabled() and not gc.get_freeze_count()
    gc.freeze()  # the test modules again


def recorded_collections(collector):
    return [(span.cause, span.attributes["automatic"]) for span in collector._recorder.drain() if span.kind == "gc"]


@pytest.mark.slow
def test_automatic_collection_stops_at_the_first_planned_collection(collector):
    assert gc.isenabled()
    collector.collect()
    assert not gc.isenabled() and gc.get_freeze_count() > 0
    recorded_collections(collector)
    assert create_cycles(20_000) == 0, "without it, Python would have collected automatically"
    before = Cycle.freed
    collector.collect()
    assert Cycle.freed - before == 20_000
    assert recorded_collections(collector) == [("step", 0)]


@pytest.mark.slow
def test_python_collects_only_the_young_generation_in_processes_with_user_code(collector):
    collector._young = True
    collector.collect()
    recorded_collections(collector)
    assert create_cycles(400_000) > 300_000
    collector.collect()
    ((cause, automatic),) = recorded_collections(collector)
    assert cause == "step" and automatic > 10


@pytest.mark.slow
def test_automatic_collections_are_recorded(collector):
    gc.collect()
    assert create_cycles(20_000) > 0
    assert recorded_collections(collector)[0][0] == "python"
    collector.collect()
    ((cause, automatic),) = [each for each in recorded_collections(collector) if each[0] != "python"]
    assert cause == "step" and automatic >= 2


@pytest.mark.slow
def test_memory_growth_triggers_a_collection_between_spans(collector, monkeypatch):
    monkeypatch.setattr(garbage, "OBJECTS", 10_000)
    collector.collect()
    recorder, before = collector._recorder, Cycle.freed
    with recorder.span("forward"):
        create_cycles(2_000)
    assert Cycle.freed == before
    with recorder.span("forward"):
        assert create_cycles(20_000) == 0, "collected inside a span"
    assert Cycle.freed - before == 22_000
    *_, (cause, automatic) = recorded_collections(collector)
    assert (cause, automatic) == ("memory", 0)
    memory = iter([100, 100 + garbage.GROWN_MIB, 101 + garbage.GROWN_MIB, 500, 500])
    monkeypatch.setattr(collector, "_held", lambda: next(memory))
    monkeypatch.setattr(collector, "_most_mib", 0)
    collector.collect()
    collector.collect_if_grown()
    assert recorded_collections(collector) == [("step", 0)]
    collector.collect_if_grown()
    (span,) = [span for span in recorder.drain() if span.kind == "gc"]
    assert span.cause == "memory" and span.attributes["grown_mib"] == garbage.GROWN_MIB + 1
    collector.collect_if_grown()
    assert not recorded_collections(collector), "memory that survived a collection counts as growth again"


@pytest.mark.slow
def test_collect_frozen_frees_objects_frozen_by_the_first_collection(collector):
    held, before = [Cycle() for _ in range(3)], Cycle.freed
    collector.collect()
    held.clear()
    collector.collect()
    assert Cycle.freed == before, "frozen objects were collected"
    collector.collect_frozen()
    assert Cycle.freed == before + 3 and gc.get_freeze_count() and not gc.isenabled()


@pytest.mark.slow
def test_imported_objects_are_frozen(collector, monkeypatch):
    before = Cycle.freed
    with garbage.importing():
        monkeypatch.setitem(sys.modules, "imported", ModuleType("imported"))
        assert create_cycles(20_000) == 0
    assert gc.isenabled()
    gc.collect()
    collector.collect_frozen()
    assert Cycle.freed == before
    collector.collect()
    collector.collect_frozen()
    assert Cycle.freed == before + 20_000


@pytest.mark.slow
def test_garbage_from_imports_is_collected_if_no_module_was_new(collector):
    before = Cycle.freed
    with garbage.importing():
        create_cycles(3)
    collector.collect()
    assert Cycle.freed == before + 3


@pytest.mark.slow
def test_early_exit_after_imports_prints_nothing():
    """Exit with an error after the libraries are loaded: nanobind reports objects not freed at exit as leaks."""
    code = "import sys; from rlfuse.cluster.garbage import importing\nwith importing(): import triton\nsys.exit(2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.slow
def test_collect_frozen_keeps_automatic_collection_if_none_was_planned(collector):
    collector.collect_frozen()
    assert gc.isenabled() and not gc.get_freeze_count()


class Engine:
    """Record each drain request and its time."""

    def __init__(self):
        self.requests = []

    async def drain(self, collect=False):
        self.requests.append((collect, time.time()))
        return [Span("gc", "trainer/0", 1.0, 1.5, cause="step")] if collect else []


@pytest.mark.slow
@pytest.mark.parametrize("gc_freq, due", [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 4]), (0, [])])
async def test_all_processes_collect_in_the_same_step(tmp_path, gc_freq, due):
    journal, engines = Journal(tmp_path, {}, gc_freq), [Engine(), Engine()]
    journal.faults = SimpleNamespace(update=lambda _: None)
    with closing(journal):
        journal.attach(engines)
        assert gc.isenabled() == (gc_freq == 0)
        for step in range(1, 6):
            spans = await journal.collect(step)
            driver_spans = [span for span in spans if (span.kind, span.where, span.cause) == ("gc", "driver", "step")]
            assert len(driver_spans) == (step in due)
            assert [engine.requests[-1][0] for engine in engines] == [step in due] * 2
            for span in driver_spans:
                assert all(0 <= span.start - engine.requests[-1][1] < 10 for engine in engines)
    assert gc.isenabled() and not gc.get_freeze_count()


def test_metrics_count_seconds_and_unplanned_collections():
    spans = [Span("gc", f"trainer/{i}", 10 + i / 4, 10.5 + i / 4, cause="step") for i in range(2)]
    assert garbage_metrics(spans) == {"timing_s/gc": 0.75, "perf/gc_unplanned": 0.0}
    spans.append(Span("gc", "rollout/0", 5.0, 6.0, cause="memory"))
    assert garbage_metrics(spans) == {"timing_s/gc": 1.75, "perf/gc_unplanned": 1.0}
    assert garbage_metrics([]) == {}
