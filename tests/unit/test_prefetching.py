"""When optimizers are fetched to their devices: the forecast of the next step, and which ranks have to start."""

from math import inf
from types import SimpleNamespace

import pytest

from rlfuse.costs.model import Costs
from rlfuse.fusion.mini_batches import COPY_MARGIN, FORECAST_SLACK_S, optimizers_to_fetch, seconds_until_step

COSTS = Costs(score_tokens_per_s=100.0, train_tokens_per_s=10.0)


def model(left, done=False):
    return SimpleNamespace(remaining_tokens=left, done=done)


def view(**more):
    defaults = dict(
        now=5.0, deadline=25.0, unfinished=0, tokens_to_score=0.0, deferred={}, effective_slots=1.0, costs=COSTS
    )
    return SimpleNamespace(**defaults | more)


def test_fetch_starts_when_the_transfer_needs_the_remaining_time():
    offloaded = {0: 1.0, 3: 2.0}
    assert optimizers_to_fetch(offloaded, COPY_MARGIN * 2.0 + FORECAST_SLACK_S + 0.1) == []
    assert optimizers_to_fetch(offloaded, COPY_MARGIN * 2.0 + FORECAST_SLACK_S) == [3]
    assert (
        optimizers_to_fetch(offloaded, 0.0) == [0, 3]
        and optimizers_to_fetch(offloaded, inf) == optimizers_to_fetch({}, 0.0) == []
    )


@pytest.mark.parametrize(
    "snapshot, models, seconds",
    [
        (view(), [], inf),
        (view(), [model(0, done=True)], inf),
        (view(), [model(50.0)], 5.0),
        (view(), [model(50.0), model(20.0), model(0.0, done=True)], 2.0),
        (view(tokens_to_score=300.0), [model(50.0)], 8.0),
        (view(tokens_to_score=300.0, effective_slots=4.0), [model(50.0)], 2.0),
        (view(unfinished=1), [model(50.0)], 20.0),
        (view(unfinished=1, tokens_to_score=3000.0), [model(50.0)], 35.0),
        (view(unfinished=1, deadline=4.0), [model(0.0)], 0.0),
        (view(tokens_to_score=300.0, deferred={"ref": {1: {"a": 100, "b": 100}}}), [model(50.0)], 6.0),
        (view(tokens_to_score=300.0, deferred={"old_log_prob": {1: {"a": 200}}}), [model(50.0)], 8.0),
    ],
)
def test_next_step_follows_generation_and_the_scoring_it_depends_on(snapshot, models, seconds):
    assert seconds_until_step(snapshot, models) == pytest.approx(seconds)
