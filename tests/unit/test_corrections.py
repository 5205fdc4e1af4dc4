"""Truncated importance weights and the mismatch between engine and trainer."""

import math
import statistics

import numpy as np
import pytest
import torch

from rlfuse.algorithms.corrections import BOUNDS, correction_weights, mismatch_metrics
from rlfuse.config.documentation import by_name
from rlfuse.config.schema import RolloutCorrection


def truncated(trainer, engine, mask, cap):
    return correction_weights(RolloutCorrection("token", cap), trainer, engine, mask)


def test_weights_against_manual_values():
    engine = torch.tensor([0.5, 0.1, 0.2, 0.4]).log().unsqueeze(0)
    trainer = torch.tensor([0.5, 0.15, 0.8, 0.1]).log().unsqueeze(0)
    weights = truncated(trainer, engine, torch.ones(1, 4), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.5, 2.0, 0.25]]))


def test_weights_without_mismatch_are_one_and_padding_is_zero():
    log_probs = torch.tensor([[-0.3, -1.2, math.nan]])
    weights = truncated(log_probs, log_probs, torch.tensor([[1, 1, 0]]), cap=2.0)
    assert weights.tolist() == [[1.0, 1.0, 0.0]]


def test_weights_have_no_gradient_and_do_not_overflow():
    trainer = torch.tensor([[0.0, -1.0]], requires_grad=True)
    weights = truncated(trainer, torch.tensor([[-1e4, -1.0]]), torch.ones(1, 2), cap=1e12)
    assert not weights.requires_grad
    assert weights[0, 0].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_uncapped_weights_make_the_estimate_unbiased():
    """Check E_engine[w f] = E_trainer[f] over the whole vocabulary; a cap can only lower it for f >= 0."""
    engine, trainer, f = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [1.0, 2.0, 3.0]

    def estimate(cap: float) -> float:
        logs = [torch.tensor([p], dtype=torch.float64).log() for p in (trainer, engine)]
        weights = truncated(*logs, torch.ones(1, 3), cap)[0].tolist()
        return sum(p * w * x for p, w, x in zip(engine, weights, f, strict=True))

    assert estimate(100.0) == pytest.approx(sum(p * x for p, x in zip(trainer, f, strict=True)))
    assert estimate(2.0) < estimate(100.0)


LENGTHS = [4, 1, 3]
ENGINE = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) - 2
TRAINER = ENGINE + 0.6 * torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[t < n for t in range(4)] for n in LENGTHS])


def ratios(row):
    """Return trainer probability / engine probability of each token of a response."""
    return [math.exp(TRAINER[row, t]) / math.exp(ENGINE[row, t]) for t in range(LENGTHS[row])]


def weights(**settings):
    noise = torch.where(MASK, 0.0, math.nan)
    found = correction_weights(RolloutCorrection(**settings), TRAINER + noise, ENGINE, MASK)
    assert not found[~MASK].any()
    return [row[:n].tolist() for row, n in zip(found, LENGTHS, strict=True)]


@pytest.mark.parametrize("lower", [None, 0.8])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncation_and_icepop_of_tokens_and_responses(level, lower):
    found = weights(rollout_is=level, rollout_is_threshold=1.3, rollout_is_threshold_lower=lower)
    bounded = 0
    for row, n in enumerate(LENGTHS):
        each = ratios(row) if level == "token" else [math.prod(ratios(row))] * n
        truncated = [min(ratio, 1.3) for ratio in each]
        wanted = truncated if lower is None else [ratio if 0.8 <= ratio <= 1.3 else 0.0 for ratio in each]
        assert found[row] == pytest.approx(wanted, rel=1e-5)
        bounded += wanted != each
    assert bounded > 0


KL = {
    "k1": lambda ratio: 1 / ratio,  # bounds apply to the ratio engine / trainer
    "k2": lambda ratio: math.log(ratio) ** 2 / 2,
    "k3": lambda ratio: ratio - 1 - math.log(ratio),
}
OVER = {"sum": sum, "max": max, "mean": statistics.fmean}


@pytest.mark.parametrize("name", by_name()["algorithm.rollout_correction.rollout_rs"].names)
@pytest.mark.parametrize("is_level", [None, "token"])
def test_rejection_of_tokens_and_responses(name, is_level):
    level, _, kind = name.rpartition("_")
    upper, lower = (1.4, 0.9) if kind == "k1" else (0.25 if "sum" in level or "max" in level else 0.1, None)
    found = weights(rollout_is=is_level, rollout_rs=name, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower)
    kept = []
    for row, n in enumerate(LENGTHS):
        each = [KL[kind](ratio) for ratio in ratios(row)]
        if level != "token":
            if kind == "k1":  # sum and mean of log-ratios are the product and geometric mean of ratios
                each = [math.prod(each) if level == "seq_sum" else statistics.geometric_mean(each)] * n
            else:
                each = [OVER[level.removeprefix("seq_")](each)] * n
        kept.append([(lower or 0) <= value <= upper for value in each])
        weight = [min(ratio, 2.0) if is_level else 1.0 for ratio in ratios(row)]
        assert found[row] == pytest.approx([w * k for w, k in zip(weight, kept[-1], strict=True)], rel=1e-5)
    assert {True, False} == {each for row in kept for each in row}


def test_the_lower_bound_of_a_ratio_is_the_inverse_of_the_upper_one():
    explicit = weights(rollout_rs="token_k1", rollout_rs_threshold=1.25, rollout_rs_threshold_lower=0.8)
    assert weights(rollout_rs="token_k1", rollout_rs_threshold=1.25) == explicit


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


def test_undefined_metrics_are_nan():
    metrics = mismatch_metrics([-1.0], [-1.5])
    assert math.isnan(metrics["training/rollout_probs_diff_std"])
    assert math.isnan(metrics["training/rollout_actor_probs_pearson_corr"])


@pytest.mark.parametrize(("engine", "trainer"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_arrays_of_different_shapes_are_refused(engine, trainer):
    with pytest.raises(ValueError, match="two flat, equally long, non-empty"):
        mismatch_metrics(engine, trainer)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest", "broken"),
    [
        ("float32", 1e-6, 1e-3, False),
        ("float32", 1e-6, 1.1e-3, True),
        ("float32", math.nan, math.nan, True),
        ("bfloat16", 0.02, 1.5, False),
        ("bfloat16", 0.7, 0.9, True),
        ("bfloat16", 0.02, 2.1, True),
    ],
)
def test_differences_that_rounding_explains(dtype, mean, largest, broken):
    metrics = {"training/rollout_log_probs_diff_mean": mean, "training/rollout_log_probs_diff_max": largest}
    assert BOUNDS[dtype].is_exceeded_by(metrics) is broken
    assert not BOUNDS[dtype].is_exceeded_by({}), "nothing was measured"
