"""Select the tokens whose covariance of log-prob and advantage lowers the entropy most, for Clip-Cov and KL-Cov.

Cui et al. 2025, arXiv 2505.22617. The selection is made once per step over all tokens in the loss, from the log-probs
of the rollout engines. So it does not depend on how rows are split into micro-batches, and each update uses the same
tokens; verl selects within each micro-batch, from the log-probs of the update. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfuse.config.schema import ActorConfig

SELECTING = frozenset({"clip_cov", "kl_cov"})
"""Values of actor.loss_mode whose loss reads `selected`."""


def covariances(log_probs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Return each token's part of the covariance, float64 [tokens]: the product of both deviations from the mean."""
    if not len(log_probs):
        return np.empty(0)
    log_probs, advantages = log_probs.astype(np.float64), advantages.astype(np.float64)
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def select_tokens(
    actor: ActorConfig, covariance: np.ndarray, seeds: Sequence[int], lengths: Sequence[int]
) -> np.ndarray:
    """Return the tokens that actor.loss_mode selects, bool [tokens]; at least one, unless none is eligible.

    kl_cov: the fraction kl_cov_ratio with the highest covariance. clip_cov: the fraction clip_cov_ratio, drawn from the
    tokens with a covariance between clip_cov_lb and clip_cov_ub. The draw follows the `seeds` of the responses, whose
    `lengths` add up to the number of tokens.
    """
    if actor.loss_mode == "kl_cov":
        rank, ratio, eligible = -covariance, actor.kl_cov_ratio, np.ones(len(covariance), bool)
    else:
        draws = [np.random.default_rng(seed).random(length) for seed, length in zip(seeds, lengths, strict=True)]
        rank, ratio = np.concatenate(draws), actor.clip_cov_ratio
        eligible = (covariance > actor.clip_cov_lb) & (covariance < actor.clip_cov_ub)
    count = min(max(1, int(ratio * len(covariance))), int(eligible.sum()))
    selected = np.zeros(len(covariance), bool)
    selected[np.argsort(np.where(eligible, rank, np.inf), kind="stable")[:count]] = True
    return selected
