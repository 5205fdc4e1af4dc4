"""When a run searches its policy's settings again."""

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
    """(what is taught, a step's spans, error of known lengths at each search for settings, which takes SEARCH_S)."""
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
def test_settings_are_searched_again_once_lengths_are_known_and_when_they_or_slots_are_others(run):
    tuning, spans, searched = run
    step_s = next(span.seconds for span in spans if span.kind == "step")
    paying = ceil(SEARCH_S / online_tuning.SHARE / step_s)
    assert paying > 2, "a search costs more than the share of a step or two"

    def steps(count):
        for _ in range(count):
            tuning.relearn(tuning, spans)

    steps(1 + paying)
    assert searched == [None], "neither lengths nor what is known of them has changed"
    tuning.lengths.error = 0.3  # the second epoch
    steps(1)
    assert searched == [None, 0.3], "the steps since the first have paid for it"
    tuning.lengths.recorded = [2 * length for length in tuning.lengths.recorded]
    steps(paying - 1)
    assert searched == [None, 0.3], "not before as much time has passed"
    steps(1)
    assert searched == [None, 0.3, 0.3]
    tuning.rates = Rates.of((1.0, 0.5))
    steps(paying)
    assert searched == [None, 0.3, 0.3, 0.3]
    tuning.lengths.error = 0.45
    steps(paying)
    assert searched == [None, 0.3, 0.3, 0.3]
    tuning.lengths.error = 0.6
    steps(1)
    assert searched == [None, 0.3, 0.3, 0.3, 0.6], "lengths are known much worse than they were"
