"""When a run repeats the search for the settings of its fusion policy."""

from math import ceil
from pathlib import Path

import pytest

from rlfuse.costs.rates import Rates
from rlfuse.events import read_events
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.tuning import Tuning
from rlfuse.simulate import online_tuning
from rlfuse.tools.simulate.recorded import config_of, read_run

SEARCH_S = 0.5


@pytest.fixture
def run(monkeypatch):
    """Return the tuning, the spans of a step, and the length error at each search; a search takes SEARCH_S."""
    folder, searched, now = Path(__file__).parent / "recorded_runs/video", [], [0.0]
    recording = read_run(folder)
    lengths, step = Lengths(512), recording.steps[-1]
    lengths.learn({0: step.workload.lengths().tolist()})

    def tune_settings(tuning, *_):
        searched.append(tuning.lengths.error)
        now[0] += SEARCH_S
        return tuning.fixed

    monkeypatch.setattr(online_tuning, "tune_settings", tune_settings)
    monkeypatch.setattr(online_tuning, "perf_counter", lambda: now[0])
    config = config_of(folder / "config.yaml")
    config.rollout.disaggregate = "off"
    tuning = Tuning(recording.fit.costs, lengths, Settings(), Rates(2), online_tuning.OnlineTuning(config, 2, print))
    return tuning, read_events(folder / "events.jsonl"), searched


@pytest.mark.slow
def test_search_repeats_when_lengths_become_known_or_lengths_or_slot_rates_change(run):
    tuning, spans, searched = run
    step_s = next(span.seconds for span in spans if span.kind == "step")
    steps_per_search = ceil(SEARCH_S / online_tuning.SHARE / step_s)
    assert steps_per_search > 2, "a search must exceed its time share of two steps"

    def steps(count):
        for _ in range(count):
            tuning.relearn(tuning, spans)

    steps(1 + steps_per_search)
    assert searched == [None], "neither lengths nor their error has changed"
    tuning.lengths.error = 0.3  # the second epoch
    steps(1)
    assert searched == [None, 0.3], "enough steps have passed since the first search"
    tuning.lengths.recorded = [2 * length for length in tuning.lengths.recorded]
    steps(steps_per_search - 1)
    assert searched == [None, 0.3], "searched before enough time has passed"
    steps(1)
    assert searched == [None, 0.3, 0.3]
    tuning.rates = Rates.of((1.0, 0.5))
    steps(steps_per_search)
    assert searched == [None, 0.3, 0.3, 0.3]
    tuning.lengths.error = 0.45
    steps(steps_per_search)
    assert searched == [None, 0.3, 0.3, 0.3]
    tuning.lengths.error = 0.6
    steps(1)
    assert searched == [None, 0.3, 0.3, 0.3, 0.6], "the length error has grown considerably"
