"""Alerts on constructed metric curves: each is raised once, at the expected step."""

from dataclasses import replace

import pytest

from rlfuse.algorithms.corrections import BOUNDS
from rlfuse.config.trainer import AlertsConfig
from rlfuse.observe.alerts import Alerts, bound_in_steps

pytestmark = pytest.mark.usefixtures("three_steps")


@pytest.fixture
def three_steps(monkeypatch):
    """Average over three steps instead of five, to keep the curves short."""
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
"""Metrics of a step that raises no alert."""


def alerts_of(rows, group_size=4, **changes):
    """Return (step, title) of every alert; metrics missing in a row are those of `QUIET`."""
    alerts = Alerts(replace(AlertsConfig(), **changes), group_size, BOUNDS["float32"], 1.0)
    return [(step, alert.title) for step, row in enumerate(rows, 1) for alert in alerts.check(QUIET | row)]


def scores(*values):
    return [{"critic/score/mean": value, "critic/score/min": 0.0, "critic/score/max": 1.0} for value in values]


def test_reward_collapse_is_reported_once_until_recovery():
    fall = [0.2, 0.5, 0.8, 0.8, 0.8, 0.4, 0.2, 0.1, 0.1, 0.8, 0.8, 0.8, 0.1, 0.1]
    assert alerts_of(scores(*fall)) == [(7, "reward collapse"), (14, "reward collapse")]
    assert not alerts_of(scores(*fall), reward_drop=None)
    assert not alerts_of(scores(0.8, 0.8, 0.8, 0.6, 0.6, 0.6)), "less than 0.3 of the range of rewards"
    wide = [row | {"critic/score/max": 10.0} for row in scores(*fall)]
    assert not alerts_of(wide), "small compared with rewards up to 10"
    below = [{"critic/score/mean": v, "critic/score/min": -2.0, "critic/score/max": -1.0} for v in (-1, -1, -1, -2, -2)]
    assert alerts_of(below) == [(4, "reward collapse")], "rewards may be negative"


def test_entropy_kl_and_gradients():
    entropies = (1, 1, 1, 0.5, 0.05, 0.05, 0.05)
    assert alerts_of([{"response/entropy": v, "actor/entropy": 1} for v in entropies]) == [(7, "entropy collapse")]
    assert alerts_of([{"actor/ppo_kl": v} for v in (0.05, 0.2, 0.2, 0.01)]) == [(2, "KL: actor/ppo_kl")]
    far = [{"actor/reward_kl_penalty": 5.0}]
    assert alerts_of(far) == [] and alerts_of(far, kl=2.0) == [(1, "KL: actor/reward_kl_penalty")]
    norms = [{"actor/grad_norm": v} for v in (1, 2, 1, 2, 1, 9, 30, 1)]
    assert alerts_of(norms) == [(7, "gradient spike: actor/grad_norm")]
    assert alerts_of([{"actor/grad_norm": v / 30} for v in (1, 2, 1, 2, 1, 9, 30, 1)]) == [], "not above grad_clip"
    assert alerts_of([{"actor/grad_norm": 30.0}]) == [], "there is no history yet"
    assert alerts_of([{"critic/grad_norm": float("nan"), "actor/pg_loss": float("inf")}]) == [(1, "not finite")]
    assert alerts_of([{"reward_model/grad_norm": v} for v in (1.0, float("inf"), float("inf"))]) == [(2, "not finite")]


def test_zero_spread_reward_failures_and_idle_slots():
    flat = [{"reward/frac_reward_zero_std": 1.0}] * 4
    assert alerts_of(flat) == [(3, "zero spread")] and not alerts_of(flat, group_size=1)
    assert alerts_of([{"reward/failure_rate": v} for v in (0.0, 0.05, 0.05)]) == [(2, "reward failures")]
    rows = [{"idle/tail": 6.0, "idle/start_up": 100.0, "busy/generate": 4.0}] * 3
    assert alerts_of(rows) == [(3, "idle slots")] and not alerts_of(rows, idle_share=0.7)
    assert not alerts_of([{"idle/start_up": 100.0, "idle/drained": 9.0, "busy/generate": 4.0}] * 3)
    assert not alerts_of([{}] * 5)


def test_engine_trainer_mismatch():
    rows = [{"training/rollout_log_probs_diff_max": value} for value in (1e-5, 0.1, 0.1, 1e-5, float("nan"))]
    assert alerts_of(rows) == [(2, "engine and trainer disagree"), (5, "engine and trainer disagree")]
    assert not alerts_of(rows[:4], log_probs_diff=None) and not alerts_of(rows[:4], log_probs_diff=200)
    assert bound_in_steps("bfloat16", 1.0, -1, "exact") == BOUNDS["bfloat16"]
    for sampled in ((0.9, -1, "exact"), (1.0, 50, "exact"), (1.0, -1, "one_step_off")):
        assert not bound_in_steps("float32", *sampled).is_exceeded_by(rows[1]), (
            "log-probs of another distribution or of older weights are not comparable"
        )


@pytest.mark.parametrize("num_restored", [0, 4, 6])
def test_a_resumed_run_restores_the_state_of_alerts(num_restored):
    rows = scores(0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.1, 0.1)
    alerts = Alerts(AlertsConfig(), 1, BOUNDS["float32"], 1.0)
    alerts.restore(QUIET | row for row in rows[:num_restored])
    alert_steps = [step for step, row in enumerate(rows[num_restored:], num_restored + 1) if alerts.check(QUIET | row)]
    assert alert_steps == [step for step in (5, 11) if step > num_restored]


WARM_UP = {"actor/ppo_kl", "actor/grad_norm"}


@pytest.mark.parametrize(
    ("missing_metrics", "more", "group_size", "changes", "keys"),
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
def test_missing_metrics_of_a_threshold_are_reported_once(missing_metrics, more, group_size, changes, keys):
    row = {name: value for name, value in QUIET.items() if name not in missing_metrics} | more
    alerts = Alerts(replace(AlertsConfig(), **changes), group_size, BOUNDS["float32"], 1.0)
    raised = [(step, alert.title) for step in range(1, 6) for alert in alerts.check(row)]
    assert raised == [(3, f"not checked: {key}") for key in keys]
    assert [alert.title for alert in [*alerts.check(QUIET), *alerts.check(row)]] == []
