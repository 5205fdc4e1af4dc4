"""Alerts on curves made by hand: each is told when it should be, once, and says what to change."""

from dataclasses import replace

import pytest

from rlfuse.algorithms.corrections import BOUNDS
from rlfuse.config.trainer import AlertsConfig
from rlfuse.observe.alerts import Alerts, bound_in_steps

pytestmark = pytest.mark.usefixtures("three_steps")


@pytest.fixture
def three_steps(monkeypatch):
    """Averages over three steps instead of five, for curves that are read at a glance."""
    monkeypatch.setattr("rlfuse.observe.alerts.WINDOW", 3)


QUIET = {
    "critic/score/mean": 0.5,
    "response/entropy": 1.0,
    "actor/ppo_kl": 0.0,
    "actor/reward_kl_penalty": 0.0,
    "actor/grad_norm": 1.0,
    "reward/frac_reward_zero_std": 0.0,
    "training/rollout_log_probs_diff_max": 0.0,
}
"""What every threshold needs, of a step in which nothing happened."""


def told(rows, group_size=4, **changes):
    """(step, title) of every alert; what a row does not say is quiet."""
    alerts = Alerts(replace(AlertsConfig(), **changes), group_size, BOUNDS["float32"], 1.0)
    return [(step, alert.title) for step, row in enumerate(rows, 1) for alert in alerts.check(QUIET | row)]


def scores(*values):
    return [{"critic/score/mean": value, "critic/score/min": 0.0, "critic/score/max": 1.0} for value in values]


def test_a_reward_that_falls_is_told_once_until_it_has_recovered():
    fall = [0.2, 0.5, 0.8, 0.8, 0.8, 0.4, 0.2, 0.1, 0.1, 0.8, 0.8, 0.8, 0.1, 0.1]
    assert told(scores(*fall)) == [(7, "reward collapse"), (14, "reward collapse")]
    assert not told(scores(*fall), reward_drop=None)
    assert not told(scores(0.8, 0.8, 0.8, 0.6, 0.6, 0.6)), "less than 0.3 of the range of rewards"
    wide = [row | {"critic/score/max": 10.0} for row in scores(*fall)]
    assert not told(wide), "rewards up to 10 were seen: this is noise"
    below = [{"critic/score/mean": v, "critic/score/min": -2.0, "critic/score/max": -1.0} for v in (-1, -1, -1, -2, -2)]
    assert told(below) == [(4, "reward collapse")], "rewards may be negative"


def test_entropy_kl_and_gradients():
    entropies = (1, 1, 1, 0.5, 0.05, 0.05, 0.05)
    assert told([{"response/entropy": v, "actor/entropy": 1} for v in entropies]) == [(7, "entropy collapse")]
    assert told([{"actor/ppo_kl": v} for v in (0.05, 0.2, 0.2, 0.01)]) == [(2, "KL: actor/ppo_kl")]
    far = [{"actor/reward_kl_penalty": 5.0}]
    assert told(far) == [] and told(far, kl=2.0) == [(1, "KL: actor/reward_kl_penalty")]
    norms = [{"actor/grad_norm": v} for v in (1, 2, 1, 2, 1, 9, 30, 1)]
    assert told(norms) == [(7, "gradient spike: actor/grad_norm")]
    assert told([{"actor/grad_norm": v / 30} for v in (1, 2, 1, 2, 1, 9, 30, 1)]) == [], "not above grad_clip"
    assert told([{"actor/grad_norm": 30.0}]) == [], "nothing is usual yet"
    assert told([{"critic/grad_norm": float("nan"), "actor/pg_loss": float("inf")}]) == [(1, "not finite")]
    assert told([{"reward_model/grad_norm": v} for v in (1.0, float("inf"), float("inf"))]) == [(2, "not finite")]


def test_spread_failures_and_idle_slots():
    flat = [{"reward/frac_reward_zero_std": 1.0}] * 4
    assert told(flat) == [(3, "zero spread")] and not told(flat, group_size=1)
    assert told([{"reward/failure_rate": v} for v in (0.0, 0.05, 0.05)]) == [(2, "reward failures")]
    rows = [{"idle/tail": 6.0, "idle/start_up": 100.0, "busy/generate": 4.0}] * 3
    assert told(rows) == [(3, "idle slots")] and not told(rows, idle_share=0.7)
    assert not told([{"idle/start_up": 100.0, "idle/drained": 9.0, "busy/generate": 4.0}] * 3)
    assert not told([{}] * 5)


def test_engines_that_sample_another_model():
    rows = [{"training/rollout_log_probs_diff_max": value} for value in (1e-5, 0.1, 0.1, 1e-5, float("nan"))]
    assert told(rows) == [(2, "engine and trainer disagree"), (5, "engine and trainer disagree")]
    assert not told(rows[:4], log_probs_diff=None) and not told(rows[:4], log_probs_diff=200)
    assert bound_in_steps("bfloat16", 1.0, -1, "exact") == BOUNDS["bfloat16"]
    for sampled in ((0.9, -1, "exact"), (1.0, 50, "exact"), (1.0, -1, "one_step_off")):
        assert not bound_in_steps("float32", *sampled).is_exceeded_by(rows[1]), (
            "of another distribution, or older weights"
        )


@pytest.mark.parametrize("known", [0, 4, 6])
def test_a_resumed_run_goes_on_where_it_was(known):
    rows = scores(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.1, 0.1)
    alerts = Alerts(AlertsConfig(), 1, BOUNDS["float32"], 1.0)
    alerts.restore(QUIET | row for row in rows[:known])
    later = [step for step, row in enumerate(rows[known:], known + 1) if alerts.check(QUIET | row)]
    assert later == [step for step in (5, 11) if step > known]


WARM_UP = {"actor/ppo_kl", "actor/grad_norm"}


@pytest.mark.parametrize(
    ("lacking", "more", "group_size", "changes", "keys"),
    [
        ({"critic/score/mean"}, {}, 4, {}, ["reward_drop"]),
        ({"response/entropy"}, {}, 4, {}, ["entropy_share"]),
        ({"response/entropy"}, {"actor/entropy": 1.0}, 4, {}, []),
        ({"reward/frac_reward_zero_std"}, {}, 4, {}, ["zero_spread"]),
        ({"reward/frac_reward_zero_std"}, {}, 1, {}, []),
        ({"reward/frac_reward_zero_std"}, {}, 4, {"zero_spread": None}, []),
        (set(), {"critic/score/mean": float("nan")}, 4, {}, ["reward_drop"]),
        ({"actor/reward_kl_penalty"}, {}, 4, {}, []),
        ({"actor/reward_kl_penalty"}, {}, 4, {"kl": 2.0}, ["kl"]),
        (WARM_UP, {}, 4, {}, ["ppo_kl", "grad_norm_factor"]),
        (WARM_UP, {"critic/grad_norm": 1.0}, 4, {}, []),
        ({"actor/ppo_kl"}, {"actor/skipped_zero_advantage": 0.9}, 4, {}, ["ppo_kl"]),
        ({"actor/ppo_kl"}, {"actor/skipped_zero_advantage": 1.0}, 4, {}, []),
        (set(QUIET), {"reward_model/loss": 0.5, "reward_model/grad_norm": 1.0}, 4, {}, []),
    ],
)
def test_a_threshold_whose_metrics_are_missing_says_so_once(lacking, more, group_size, changes, keys):
    row = {name: value for name, value in QUIET.items() if name not in lacking} | more
    alerts = Alerts(replace(AlertsConfig(), **changes), group_size, BOUNDS["float32"], 1.0)
    raised = [(step, alert.title) for step in range(1, 6) for alert in alerts.check(row)]
    assert raised == [(3, f"not checked: {key}") for key in keys]
    assert [alert.title for alert in [*alerts.check(QUIET), *alerts.check(row)]] == []
