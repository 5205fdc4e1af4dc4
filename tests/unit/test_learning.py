"""When a run has its policy's settings found anew."""

from pathlib import Path

import pytest

from rlfuse.events import read_events
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.rates import Rates
from rlfuse.fusion.tuning import Tuning
from rlfuse.simulate import learning
from rlfuse.simulate.recorded import config_of, read_run


@pytest.fixture
def run(monkeypatch):
    """(what is taught, its last step's spans, share of known lengths at each search for settings)."""
    folder, searched = Path(__file__).parent / "recorded_runs/video", []
    recording = read_run(folder)
    lengths, step = Lengths(512), recording.steps[-1]
    lengths.learn({0: step.workload.lengths().tolist()})

    def tuned(tuning, *_):
        searched.append(tuning.lengths.known_share)
        return tuning.fixed

    monkeypatch.setattr(learning, "tuned", tuned)
    config = config_of(folder / "config.yaml")
    config.rollout.disaggregate = "off"
    tuning = Tuning(recording.fit.costs, lengths, Settings(), Rates(2), learning.Learning(config, 2, print))
    return tuning, read_events(folder / "events.jsonl"), searched


def test_settings_are_searched_again_once_lengths_are_known_and_when_they_or_slots_are_others(run):
    tuning, spans, searched = run
    for _ in range(2 * learning.PAUSE):
        tuning.relearn(tuning, spans)
    assert searched == [0.0], "neither lengths nor what is known of them has changed"
    tuning.lengths.known_share = 1.0  # the second epoch
    for _ in range(2 * learning.PAUSE):
        tuning.relearn(tuning, spans)
    assert searched == [0.0, 1.0]
    tuning.lengths.recorded = [2 * length for length in tuning.lengths.recorded]
    for _ in range(2 * learning.PAUSE):
        tuning.relearn(tuning, spans)
    assert searched == [0.0, 1.0, 1.0]
    tuning.rates = Rates.of((1.0, 0.5))
    for _ in range(2 * learning.PAUSE):
        tuning.relearn(tuning, spans)
    assert searched == [0.0, 1.0, 1.0, 1.0]
