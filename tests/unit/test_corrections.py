"""Truncated importance weights and the mismatch between engine and trainer."""

import math
import statistics

import numpy as np
import pytest
import torch

from rlfuse.algorithms.corrections import BOUNDS, mismatch_metrics, truncated_importance_weights


def test_weights_by_hand():
    engine = torch.tensor([0.5, 0.1, 0.2, 0.4]).log().unsqueeze(0)
    trainer = torch.tensor([0.5, 0.15, 0.8, 0.1]).log().unsqueeze(0)
    weights = truncated_importance_weights(trainer, engine, torch.ones(1, 4), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.5, 2.0, 0.25]]))


def test_weights_without_mismatch_are_one_and_padding_is_zero():
    log_probs = torch.tensor([[-0.3, -1.2, math.nan]])
    weights = truncated_importance_weights(log_probs, log_probs, torch.tensor([[1, 1, 0]]), cap=2.0)
    assert weights.tolist() == [[1.0, 1.0, 0.0]]


def test_weights_have_no_gradient_and_do_not_overflow():
    trainer = torch.tensor([[0.0, -1.0]], requires_grad=True)
    weights = truncated_importance_weights(trainer, torch.tensor([[-1e4, -1.0]]), torch.ones(1, 2), cap=1e12)
    assert not weights.requires_grad
    assert weights[0, 0].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_uncapped_weights_make_the_estimate_unbiased():
    """E_engine[w f] = E_trainer[f] over a whole vocabulary; with a cap it cannot be larger, for f >= 0."""
    engine, trainer, f = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [1.0, 2.0, 3.0]

    def estimate(cap: float) -> float:
        logs = [torch.tensor([p], dtype=torch.float64).log() for p in (trainer, engine)]
        weights = truncated_importance_weights(*logs, torch.ones(1, 3), cap)[0].tolist()
        return sum(p * w * x for p, w, x in zip(engine, weights, f, strict=True))

    assert estimate(100.0) == pytest.approx(sum(p * x for p, x in zip(trainer, f, strict=True)))
    assert estimate(2.0) < estimate(100.0)


def test_metrics_against_the_statistics_module():
    engine, trainer = [-0.1, -2.0, -0.7, -3.0], [-0.2, -1.5, -0.7, -3.3]
    metrics = mismatch_metrics(np.array(engine, dtype=np.float32), np.array(trainer, dtype=np.float32))
    pairs = [(math.exp(a), math.exp(b)) for a, b in zip(engine, trainer, strict=True)]
    diff = [abs(a - b) for a, b in pairs]
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": statistics.fmean(diff),
            "training/rollout_probs_diff_max": max(diff),
            "training/rollout_probs_diff_std": statistics.stdev(diff),
            "training/rollout_actor_probs_pearson_corr": statistics.correlation(*zip(*pairs, strict=True)),
            "training/rollout_log_probs_diff_mean": 0.225,
            "training/rollout_log_probs_diff_max": 0.5,
        },
        rel=1e-5,
    )


def test_metrics_of_equal_log_probs():
    metrics = mismatch_metrics([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5])
    assert metrics.pop("training/rollout_actor_probs_pearson_corr") == pytest.approx(1.0)
    assert set(metrics.values()) == {0.0}


def test_figures_that_do_not_exist_are_nan():
    metrics = mismatch_metrics([-1.0], [-1.5])
    assert math.isnan(metrics["training/rollout_probs_diff_std"])
    assert math.isnan(metrics["training/rollout_actor_probs_pearson_corr"])


@pytest.mark.parametrize(("engine", "trainer"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_arrays_that_do_not_match_are_refused(engine, trainer):
    with pytest.raises(ValueError, match="two flat, equally long, non-empty"):
        mismatch_metrics(engine, trainer)


@pytest.mark.parametrize(
    ("dtype", "mean", "most", "broken"),
    [
        ("float32", 1e-6, 1e-3, False),
        ("float32", 1e-6, 1.1e-3, True),
        ("float32", math.nan, math.nan, True),
        ("bfloat16", 0.02, 1.5, False),
        ("bfloat16", 0.7, 0.9, True),
        ("bfloat16", 0.02, 2.1, True),
    ],
)
def test_what_rounding_explains(dtype, mean, most, broken):
    metrics = {"training/rollout_log_probs_diff_mean": mean, "training/rollout_log_probs_diff_max": most}
    assert BOUNDS[dtype].is_exceeded_by(metrics) is broken
    assert not BOUNDS[dtype].is_exceeded_by({}), "nothing was measured"
