"""Token selection of Clip-Cov and KL-Cov against per-token loops, and independent of the order of samples."""

import numpy as np
import pytest

from rlfuse.algorithms.covariance import covariances, select_tokens
from rlfuse.config.schema import ActorConfig

LENGTHS, SEEDS = [30, 5, 40, 25], [11, 22, 33, 44]


def drawn():
    random = np.random.default_rng(0)
    return random.normal(-1, 1, sum(LENGTHS)).astype(np.float32), random.normal(0, 2, sum(LENGTHS)).astype(np.float32)


def reference_covariances(log_probs, advantages):
    of_log_probs, of_advantages = sum(map(float, log_probs)) / 100, sum(map(float, advantages)) / 100
    pairs = zip(map(float, log_probs), map(float, advantages), strict=True)
    return [(x - of_log_probs) * (a - of_advantages) for x, a in pairs]


def test_the_covariance_is_the_product_of_the_deviations():
    assert covariances(*drawn()) == pytest.approx(reference_covariances(*drawn()), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("ratio", "count"), [(0.0002, 1), (0.055, 5), (1.0, 100)])
def test_kl_cov_selects_the_highest_covariances(ratio, count):
    covariance = reference_covariances(*drawn())
    selected = select_tokens(ActorConfig(loss_mode="kl_cov", kl_cov_ratio=ratio), np.array(covariance), SEEDS, LENGTHS)
    highest = sorted(range(100), key=lambda token: -covariance[token])[:count]
    assert sorted(np.flatnonzero(selected)) == sorted(highest)


@pytest.mark.parametrize(
    ("ratio", "lower", "upper"), [(0.05, 0.5, 4.0), (1.0, 0.5, 4.0), (0.001, -1.0, 1.0), (1, 90, 99)]
)
def test_clip_cov_draws_tokens_between_the_bounds(ratio, lower, upper):
    covariance = reference_covariances(*drawn())
    actor = ActorConfig(loss_mode="clip_cov", clip_cov_ratio=ratio, clip_cov_lb=lower, clip_cov_ub=upper)
    selected = select_tokens(actor, np.array(covariance), SEEDS, LENGTHS)
    eligible = {token for token, each in enumerate(covariance) if lower < each < upper}
    assert set(np.flatnonzero(selected)) <= eligible
    assert selected.sum() == min(max(1, int(ratio * 100)), len(eligible))
    others = select_tokens(actor, np.array(covariance), [each + 1 for each in SEEDS], LENGTHS)
    assert (selected != others).any() == (0 < selected.sum() < len(eligible))


def test_selected_tokens_are_independent_of_the_order_of_responses():
    covariance = np.split(np.array(reference_covariances(*drawn())), np.cumsum(LENGTHS)[:-1])
    actor = ActorConfig(loss_mode="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.1)
    order = [2, 0, 3, 1]
    shuffled = [[each[i] for i in order] for each in (covariance, SEEDS, LENGTHS)]
    first = np.split(select_tokens(actor, np.concatenate(covariance), SEEDS, LENGTHS), np.cumsum(LENGTHS)[:-1])
    second = select_tokens(actor, np.concatenate(shuffled[0]), *shuffled[1:])
    assert second.tolist() == np.concatenate([first[i] for i in order]).tolist()
