"""Detection of slow workers on constructed spans, samples and windows; `test_health_faults.py` tests whole runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from worlds.injected_faults import MadeRun, alarms_of

from rlfuse.costs.model import Costs
from rlfuse.events import Span, read_events
from rlfuse.health.detection import STEPS, Detector
from rlfuse.health.monitor import FILE, Monitor, alert_of, read_alarms, write_alarms
from rlfuse.health.series import ExpectedSeconds, Sample, Series, WarmUpFilter, Window, class_of
from rlfuse.health.signals import SIGNALS

ROOT = Path(__file__).resolve().parents[2]


def decode(slot, start, seconds, batch=8, steps=10, step=1):
    work = {"steps": steps, "batch": batch, "context": 100, "prefill_tokens": 0}
    return Span("decode", f"rollout/{slot}", start, start + seconds, step, tokens=batch * steps, attributes=work)


def windows(levels, metric="slowness", role="rollout", first=1, seconds=8.0, weight=4.0):
    """Yield one window per step from `levels` [windows][workers]; None: no value."""
    for number, row in enumerate(levels, first):
        values = {f"{role}/{i}": (value, weight) for i, value in enumerate(row) if value is not None}
        yield Window(number, number * seconds, (number + 1) * seconds, {metric: values})


def alarms(levels, continuity_s=240.0, detector=None, **more):
    detector = detector or Detector(continuity_s)
    return [alarm for window in windows(levels, **more) for alarm in detector.add_window(window)]


def scattered(count, workers, seed=0, scatter=0.05):
    return np.random.default_rng(seed).lognormal(0, scatter, (count, workers))


# Work and series ------------------------------------------------------------------------------------------------------


def test_expected_seconds_are_learned_per_class_and_robust_to_one_slow_worker():
    expected, costs = ExpectedSeconds(), Costs(step_base_s=0.01, flat_batch=64)
    work = [decode(slot, 0, 0.2 if slot < 3 else 0.6) for slot in range(4) for _ in range(5)]
    tail = [decode(0, 0, 0.3, batch=1) for _ in range(5)]
    expected.learn(work + tail, costs)
    assert expected.seconds(decode(3, 0, 9.0)) == pytest.approx(0.2), "the slow worker changed the expectation"
    assert expected.seconds(decode(3, 0, 9.0, steps=20)) == pytest.approx(0.4), "scaled by the costs within a class"
    assert expected.seconds(decode(3, 0, 9.0, batch=1)) == pytest.approx(0.3), "a small batch is a separate class"
    assert expected.seconds(decode(3, 0, 9.0, batch=16)) is None, "class without data"
    expected.learn([decode(3, 0, 2.0) for _ in range(500)], Costs(step_base_s=1.0))
    assert expected.seconds(decode(3, 0, 9.0)) == pytest.approx(0.2), "the first measurements are kept"
    stage = Span("forward", "trainer/0", 0, 1, tokens=9, attributes={"stage": 0, "model": "actor"})
    assert class_of(stage) != class_of(replace(stage, attributes={"stage": 1, "model": "actor"}))


def test_warm_up_ends_after_the_first_step_and_restarts_with_the_worker():
    warm_up = WarmUpFilter()
    assert warm_up.work_of([decode(0, 0, 1)]) == ([], set())
    assert warm_up.work_of([decode(0, 0, 1), decode(1, 0, 2)]) == ([decode(0, 0, 1)], set()), "the other worker is new"
    restart = Span("restart", "rollout/0", 0, 1)
    failed = replace(decode(1, 0, 1), attributes={"error": "gone"})
    assert warm_up.work_of([restart, decode(0, 0, 1), failed]) == ([], {"rollout/0"})
    assert warm_up.work_of([decode(0, 0, 1)])[0] == [decode(0, 0, 1)]


def test_series_spreads_spans_over_their_seconds():
    expected, series = ExpectedSeconds(), Series(100.0, 120.0)
    expected.learn([decode(slot, 0, 2.0) for slot in range(2) for _ in range(3)], Costs(step_base_s=0.01))
    series.add_spans([decode(0, 98.0, 4.0), decode(0, 110.0, 2.0), decode(1, 104.5, 3.0)], expected)
    busy = [Sample("rollout/1", at + 1.0, 1.0, {"cpu": 0.6, "gpu_clock": 1500.0}) for at in range(100, 120)]
    node = [Sample("node/a", at + 2.0, 2.0, {"io_pressure": 0.25}) for at in range(100, 120, 2)]
    series.add_samples([*busy, *node])
    first, second = series.windows(7)
    assert (first.step, first.start, first.end, second.end) == (7, 100.0, 110.0, 120.0)
    assert first.values["slowness"] == {"rollout/0": (2.0, 2.0), "rollout/1": (1.5, 2.0)}
    assert second.values["slowness"] == {"rollout/0": (1.0, 2.0)}, "idle workers have no value"
    assert first.values["cpu"]["rollout/1"][0] == pytest.approx(4 * 0.6 / 2), "only the four seconds with work count"
    assert first.values["gpu_clock"]["rollout/1"][0] == pytest.approx(1500) and "rollout/1" not in second.values["cpu"]
    assert first.values["io_pressure"] == {"node/a": (0.25, 10.0)}
    assert series.mean("cpu", "rollout/1") == pytest.approx(0.6)


# Detection ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 4, 16, 64])
def test_slow_worker_is_reported_with_evidence(workers):
    levels = scattered(80, workers)
    levels[20:50, 1] *= 1.6
    began, ended = alarms(levels)
    assert (began.worker, began.metric, began.ended) == ("rollout/1", "slowness", None)
    assert set(began.peers) == {f"rollout/{i}" for i in range(workers)} - {"rollout/1"}
    assert 21 <= began.step <= 24 and began.began == began.step * 8, "windows count from 1"
    assert began.window == (began.raised - 8, began.raised) and began.step + STEPS * 8 <= began.raised
    assert began.distance >= began.threshold and began.value / began.usual == pytest.approx(began.ratio)
    assert 1.3 < began.ratio < 1.75
    assert ended == replace(began, ended=ended.ended) and 51 * 8 < ended.ended < 75 * 8


@pytest.mark.slow
def test_healthy_workers_and_short_jitter_raise_no_alarm():
    for workers in (2, 3, 8, 64):
        levels = scattered(80, workers, seed=workers, scatter=0.1)
        assert not alarms(levels)
        levels[30:35, 0] *= 4
        assert not alarms(levels), "40 seconds"
        levels[40:] *= 1.7
        assert not alarms(levels), "all workers are slower"


def test_repeated_slowness_is_detected():
    levels = scattered(80, 5)
    levels[20:60:3, 2] *= 4
    began = [alarm for alarm in alarms(levels) if alarm.ended is None]
    assert [alarm.worker for alarm in began] == ["rollout/2"] and began[0].ratio > 1.3


def test_missing_values_neither_raise_nor_clear():
    levels = scattered(80, 4).tolist()
    for number, row in enumerate(levels):
        row[3] *= 1.8 if number >= 20 else 1
        if number % 3:
            row[3] = None
        if number % 7 == 0:
            row[0] = row[1] = None
    (began,) = alarms(levels)
    assert began.worker == "rollout/3" and began.ended is None
    assert not alarms([[1.0, 1.0], *[[None, 5.0]] * 60]), "no peers to compare with"


def test_single_worker_is_compared_with_its_first_windows():
    levels = scattered(60, 1)
    assert not alarms(levels * 3), "constant speed"
    levels[20:] *= 1.3
    assert not alarms(levels), "the run may have changed"
    levels[20:] *= 1.5
    (began,) = alarms(levels)
    assert began.peers == () and "at its start (it has no peers)" in alert_of(began, None).text


def test_constant_offset_of_a_node_is_ignored_and_sudden_outliers_are_reported():
    pressure = np.abs(scattered(60, 4, scatter=0.2) - 1) * 0.01
    pressure[:, 0] += 0.02
    assert not alarms(pressure, metric="io_pressure", role="node"), "the driver's node writes more"
    pressure[:, 2] += 0.3
    (began,) = alarms(pressure, metric="io_pressure", role="node")
    assert began.worker == "node/2" and "% of the time stalled for disks" in alert_of(began, None).text
    clock = scattered(60, 4, scatter=0.01) * 1900
    clock[30:, 1] = 1200
    (began,) = alarms(clock, metric="gpu_clock")
    assert began.worker == "rollout/1" and began.value < 0.75 * began.usual, "low is bad here"
    clock[30:, 1] = 2600
    assert not alarms(clock, metric="gpu_clock")


def test_short_steps_and_small_continuity_s_shorten_detection():
    levels = scattered(60, 4)
    levels[20:, 1] *= 1.8
    (first,) = alarms(levels, seconds=2.0)
    assert STEPS * 2 <= first.raised - first.began <= (STEPS + 4) * 2
    (earlier,) = alarms(levels, continuity_s=30.0)
    assert 30 <= earlier.raised - earlier.began <= 60


def test_restarted_worker_is_evaluated_from_scratch():
    levels, detector = scattered(60, 4), Detector()
    levels[20:, 1] *= 1.8
    assert not alarms(levels[:27], detector=detector)
    detector.forget("rollout/1")
    assert not alarms(levels[27:34], detector=detector, first=28)
    (began,) = alarms(levels[34:], detector=detector, first=35)
    assert began.step >= 34


def test_one_alarm_per_worker_lists_other_outliers():
    detector, found = Detector(), []
    for number, slow in enumerate([1.0] * 20 + [2.0] * 40, 1):
        cpu = {f"rollout/{i}": (slow if i == 0 else 1.0, 4.0) for i in range(4)}
        node = {f"node/{i}": (0.4 if i == 0 and slow > 1 else 0.0, 8.0) for i in range(4)}
        values = {"slowness": cpu, "cpu": cpu, "memory_pressure": node}
        window = Window(number, number * 8.0, number * 8.0 + 8, values)
        found += detector.add_window(window, {f"rollout/{i}": f"node/{i}" for i in range(4)})
    assert [(alarm.worker, alarm.metric) for alarm in found] == [
        ("rollout/0", "slowness"),
        ("node/0", "memory_pressure"),
    ]
    assert [text.partition(":")[0] for text in found[0].related] == ["rollout/0", "node/0"]
    assert "% of the time stalled for memory" in found[0].related[1]


# Alarm files and the monitor ------------------------------------------------------------------------------------------


def test_alarms_recommend_an_action_and_are_read_back_once_each(tmp_path):
    levels = scattered(60, 4)
    levels[20:40, 1] *= 1.6
    began, ended = alarms(levels)
    write_alarms(tmp_path, [began])
    assert read_alarms(tmp_path) == [began]
    write_alarms(tmp_path, [ended])
    assert read_alarms(tmp_path) == [ended] and len((tmp_path / FILE).read_text().splitlines()) == 2
    assert set(json.loads((tmp_path / FILE).read_text().splitlines()[0])) >= {"metric", "window", "distance", "peers"}
    assert read_alarms(tmp_path / "nowhere") == []
    alert = alert_of(began, 1)
    assert alert.title == "slow worker: rollout/1" and "rlfuse slots drain 1" in alert.text
    assert "3 peers (rollout/0, rollout/2, rollout/3)" in alert.text and f"(step {began.step})" in alert.text
    fault = alert_of(replace(began, worker="node/a", metric="disk_latency", value=0.2, usual=0.001), None)
    assert fault.title == "faulty worker: node/a" and "slots drain" not in fault.text


class FakeAgent:
    """Agent of one node that returns the samples it is given."""

    node = "node/a"

    def __init__(self):
        self.samples, self.failure, self.closed = [], "", False

    async def drain(self):
        samples, self.samples = self.samples, []
        return samples, self.failure

    def close(self):
        self.closed = True


async def test_alarms_are_reported_even_if_they_cannot_be_written(tmp_path, monkeypatch):
    levels, titles, messages = scattered(60, 4), [], []
    levels[20:40, 1] *= 1.6
    began, ended = alarms(levels)
    (tmp_path / FILE).mkdir()
    monitor = Monitor(tmp_path, [], 40.0, 1, lambda step, alert: titles.append(alert.title), messages.append)
    for step, alarm in enumerate((began, ended), 1):
        monkeypatch.setattr(monitor.detector, "add_window", lambda *_, alarm=alarm: [alarm])
        await monitor.check_step(step, [], Costs())
        await monitor.check_step(step, [], Costs())
    assert set(titles) == {"slow worker: rollout/1"}
    assert "Health check failed in step 1: IsADirectoryError" in messages[0]
    assert any("rollout/1 matches its peers again" in each for each in messages)


async def test_monitor_reports_writes_and_measures_and_never_ends_the_run(tmp_path, monkeypatch):
    clock = iter(np.arange(0.0, 1000.0, 4.0))
    monkeypatch.setattr("rlfuse.clock.now", lambda: float(next(clock)))
    agent, alerts, messages = FakeAgent(), [], []
    monitor = Monitor(tmp_path, [agent], 40.0, 2, lambda step, alert: alerts.append((step, alert)), messages.append)
    for step in range(1, 40):
        start = (step - 1) * 4.0
        spans = [decode(i, start + j, 0.9 * (1.8 if i == 1 and step > 20 else 1)) for i in range(3) for j in range(3)]
        agent.samples = [Sample("rollout/0", start + i, 1.0, {"cpu": 0.5, "memory_gb": 2.0}) for i in (1, 2, 3)]
        values = await monitor.check_step(step, spans, Costs())
        if step == 2:
            agent.failure = "no permission"
    assert values["health/alarms"] == 1 and values["health/agents"] == 1 and values["health/memory_gb/max"] == 2
    assert 1.6 < values["health/slowness/rollout/max"] < 2
    assert [alert.title for _, alert in alerts] == ["slow worker: rollout/1"] and 23 <= alerts[0][0] <= 33
    (alarm,) = read_alarms(tmp_path)
    assert alarm.step in (21, 22) and messages == ["Health data of node/a is incomplete: no permission"]
    monkeypatch.setattr(monitor.detector, "add_window", lambda *_: 1 / 0)
    for step in (40, 41):
        assert await monitor.check_step(step, spans, Costs()) == {}
    assert messages[1:] == ["Health check failed in step 40: ZeroDivisionError: division by zero"]
    monitor.close()
    assert agent.closed


@pytest.mark.slow
def test_generated_runs_with_and_without_a_slow_slot():
    healthy, slow = MadeRun(11, 4, near_miss="checkpoint"), MadeRun(3, 4, "slow")
    assert not alarms_of(healthy)
    named = {alarm.worker for alarm in alarms_of(slow)}
    assert named and named <= slow.guilty


def test_a_recorded_run_is_healthy():
    spans = read_events(ROOT / "notebooks" / "data" / "run" / "events.jsonl")
    steps = [span for span in spans if span.kind == "step"]
    expected, detector, found = ExpectedSeconds(), Detector(1.0), []
    for step in steps:
        inside = [span for span in spans if step.start <= span.start and span.end <= step.end]
        expected.learn(inside, Costs())
        series = Series(step.start, step.end)
        series.add_spans(inside, expected)
        found += [alarm for window in series.windows(step.step) for alarm in detector.add_window(window)]
    assert len(steps) == 2 and not found


def test_signal_conversions_are_inverse_and_monotonic():
    for signal in SIGNALS.values():
        assert signal.value(signal.compared(0.7)) == pytest.approx(0.7)
        assert (signal.compared(0.9) > signal.compared(0.7)) == (signal.worse > 0)
