"""Advantage estimators: per-token advantages and returns from rewards and values.

Pure functions of padded tensors: `[B, T]` float32, B responses of at most T tokens, `mask` [B, T] 1 on response tokens;
rewards and values in reward units.
Invariants:
- masked-out positions are ignored, even if they hold NaN, and every result is 0 there;
- a masked-out position between response tokens is skipped, as if its neighbours were adjacent;
- a built-in estimate of a row depends on the row's group only, except gpg. Whitened estimates, and custom estimators
  unless they set `needs_batch=False`, depend on the whole batch and wait for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlfuse.algorithms.losses import mask_response
from rlfuse.algorithms.registry import NO_KWARGS, Registry, parameters

ESTIMATORS = Registry("algorithm.adv_estimator")
"""Their requirements and whitening are declared in `config.estimators`."""
NEEDED = {
    "values": "run the critic before computing advantages",
    "groups": "pass the group number of each row",
    "baselines": "pass the score of each prompt's greedy response",
    "old_log_probs": "score the rows with the policy before computing advantages",
    "ref_log_probs": "score the rows with the reference before computing advantages",
}
"""Argument without which an estimator that reads it can't be called -> what to do."""


def advantages_and_returns(
    estimator: str,
    token_rewards: Tensor,
    values: Tensor | None,
    groups: Tensor | None,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    by_std: bool = True,
    dimensions: tuple[Tensor, Tensor] | None = None,
    n: int = 1,
    baselines: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kwargs: Mapping[str, Any] = NO_KWARGS,
) -> tuple[Tensor, Tensor]:
    """Call the named estimator; return (advantages before whitening, returns), each [B, T].

    The estimator receives the arguments that match its parameter names: those of this function, `scores` (float32 [B],
    sums of token rewards), `dimensions` (float32 [B, K], scores of K rewards, NaN where one does not apply) and
    `weights` (float32 [K]). Without `dimensions`, the score is the only dimension. It returns (advantages, returns), or
    one matrix that serves as both. `n`: responses sampled per prompt; a group is smaller if rewards failed.
    `baselines`: float32 [B], score of the greedy response to each row's prompt. `kwargs`: additional arguments of a
    custom estimator.
    """
    used = parameters(ESTIMATORS.find(estimator))
    # A cumulative sum: the order of a plain sum, and so its last bit, depends on the padded width.
    scores = mask_response(token_rewards, mask).double().cumsum(-1)[:, -1].float()
    columns, weights = dimensions or (scores[:, None], torch.ones(1))
    given = {"token_rewards": token_rewards, "scores": scores, "mask": mask, "groups": groups, "values": values}
    given |= {"baselines": baselines, "old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs}
    given |= {"dimensions": columns, "weights": weights, "gamma": gamma, "lam": lam, "by_std": by_std, "n": n}
    for name, remedy in NEEDED.items():
        if name in used and given[name] is None:
            raise ValueError(f"algorithm.adv_estimator={estimator} needs {name}, got None: {remedy}.")
    found = ESTIMATORS.call(estimator, given, kwargs)
    matrices = found if isinstance(found, tuple) and len(found) == 2 else (found, found)
    advantages, returns = (
        mask_response(ESTIMATORS.check_result(estimator, each, mask), mask).float() for each in matrices
    )
    return advantages, returns


@ESTIMATORS.built_in()
def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates (GAE; Schulman et al. 2015, arXiv 1506.02438), not whitened.

    `values` [B, T]: the value of the state before each token; after the last response token it is 0. Returns
    (advantages, returns = advantages + values), each [B, T].
    """
    rewards, values, keep = mask_response(token_rewards, mask), mask_response(values, mask), mask.bool()
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(keep[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(keep[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return mask_response(advantages, mask), mask_response(advantages + values, mask)


@ESTIMATORS.built_in()
def grpo(scores: Tensor, groups: Tensor, mask: Tensor, by_std: bool, n: int = 1) -> Tensor:
    """Compute group-relative advantages (GRPO; Shao et al. 2024, DeepSeekMath, arXiv 2402.03300), [B, T].

    `scores` [B], `groups` [B] int. The advantage is the score minus the group's mean, divided by the group's sample
    standard deviation (n - 1, plus 1e-6) if `by_std`; Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) omits the division.
    A group of one cannot be compared: with `n` = 1 its advantage is its score; the last response of a larger group
    gets 0, since a raw score would outweigh the centred ones.
    """
    return _over_tokens(_centred(scores, groups, by_std, n), mask)


@ESTIMATORS.built_in()
def gdpo(dimensions: Tensor, weights: Tensor, groups: Tensor, mask: Tensor, by_std: bool, n: int = 1) -> Tensor:
    """Compute group reward-decoupled advantages (GDPO; Liu et al. 2026, arXiv 2601.05242), [B, T].

    `dimensions` [B, K]: scores of K rewards, NaN where a reward does not apply to a response; `weights` [K]. Each
    reward is normalised within the group as in `grpo`, then the weighted sum is taken. So rewards of different ranges,
    and combinations with the same sum, remain distinguishable. The paper's batch normalisation is `whiten` by response.
    """
    total = torch.zeros(len(dimensions), dtype=torch.float64, device=dimensions.device)
    for column, weight in zip(dimensions.double().T, weights.double(), strict=True):
        has = ~column.isnan()
        total[has] += weight * _centred(column[has], groups[has], by_std, n)
    return _over_tokens(total, mask)


@ESTIMATORS.built_in()
def rloo(scores: Tensor, groups: Tensor, mask: Tensor, n: int = 1) -> Tensor:
    """Compute leave-one-out advantages (RLOO; Ahmadian et al. 2024, arXiv 2402.14740), [B, T].

    `scores` [B], `groups` [B] int. The advantage is the score minus the mean score of the *other* responses of the
    group. For a group of one it is the score if `n` is 1, else 0, as in `grpo`.
    """
    _, size = _group_means(scores, groups)
    # score - (sum - score) / (size - 1) = (score - mean) * size / (size - 1)
    return _over_tokens(_centred(scores, groups, False, n) * size / (size - 1).clamp(min=1), mask)


@ESTIMATORS.built_in()
def remax(token_rewards: Tensor, baselines: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns) with a greedy baseline (ReMax; Li et al. 2023, arXiv 2310.10505), each [B, T].

    `baselines` [B]: score of the greedy response to the prompt, without a KL penalty. The return of a token is the sum
    of the rewards from that token on; the advantage is the return minus the baseline.
    """
    returns = reinforce_plus_plus(token_rewards, mask, 1.0)[0]
    return mask_response(returns - baselines[:, None], mask), returns


@ESTIMATORS.built_in()
def opo(scores: Tensor, groups: Tensor, mask: Tensor, n: int = 1) -> Tensor:
    """Compute advantages with the length-weighted optimal baseline (OPO; Hao et al. 2025, arXiv 2505.23585), [B, T].

    `scores` [B], `groups` [B] int. The advantage is the score minus the group's mean score weighted by the number of
    response tokens. For a group of one it is the score if `n` is 1, else 0, as in `grpo`.
    """
    return _over_tokens(_centred(scores, groups, False, n, mask.sum(-1)), mask)


@ESTIMATORS.built_in()
def gpg(scores: Tensor, groups: Tensor, mask: Tensor, n: int = 1) -> Tensor:
    """Compute advantages of group policy gradient (GPG; Chu et al. 2025, arXiv 2504.02546), [B, T].

    `scores` [B], `groups` [B] int. The score minus the group's mean, times B / (B - M) (equation 7), M the number of
    responses in groups of equal scores, which have no gradient. The paper's threshold for B - M, below which it samples
    more groups, is omitted. verl divides by the number of non-zero scores instead, which is the same only if no other
    group contains a score of 0.
    """
    _, index = groups.unique(return_inverse=True)
    lowest, highest = (
        torch.zeros_like(scores).scatter_reduce(0, index, scores, extreme, include_self=False)[index]
        for extreme in ("amin", "amax")
    )
    unequal = int((lowest < highest).sum())
    return _over_tokens(_centred(scores, groups, False, n) * (len(scores) / max(1, unequal)), mask)


@ESTIMATORS.built_in()
def reinforce_plus_plus_baseline(scores: Tensor, groups: Tensor, mask: Tensor, n: int = 1) -> Tensor:
    """Compute advantages of REINFORCE++-baseline (Hu 2025, arXiv 2501.03262), [B, T], not whitened.

    `scores` [B], `groups` [B] int. The score minus the group's mean; whitened over the batch afterwards, in place of a
    division by the group's deviation. Groups of one: see `grpo`.
    """
    return _over_tokens(_centred(scores, groups, False, n), mask)


@ESTIMATORS.built_in()
def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns) of REINFORCE++ (Hu 2025, arXiv 2501.03262), each [B, T], not whitened.

    The return of a token is the discounted sum of the rewards from that token on. Advantages equal the returns and are
    whitened over the batch afterwards. Needs neither a critic nor groups.
    """
    rewards, keep = mask_response(token_rewards, mask), mask.bool()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(keep[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    returns = mask_response(returns, mask)
    return returns, returns


@ESTIMATORS.built_in()
def distill(old_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute the advantages of on-policy distillation, [B, T] in nats: log p_teacher - log p_student per token.

    `ref_log_probs` [B, T] are the teacher's log-probs of the student's tokens, `old_log_probs` [B, T] the student's own
    before the update. Each token's reward is the negative estimate of the reverse KL on it, with discount 0 (Lu and
    Thinking Machines 2025, On-Policy Distillation), so the policy gradient is that of KL(student || teacher) at the
    positions that the student visits, the reverse KL of GKD (Agarwal et al. 2023, arXiv 2306.13649). Ignores rewards.
    """
    return mask_response(ref_log_probs - old_log_probs, mask)


def whiten(advantages: Tensor, mask: Tensor, by_response: bool = False) -> Tensor:
    """Normalise to zero mean and unit variance over the batch, [B, T]; sample variance (n - 1) plus 1e-8.

    Statistics are over all response tokens, so long responses weigh more. `by_response` (gdpo): over responses, each
    with one advantage for all its tokens.
    """
    if by_response:
        counted = advantages.gather(1, mask.int().argmax(1, keepdim=True)).flatten().double()
    else:  # response tokens only, in order, so that padding does not affect rounding
        counted = advantages[mask.bool()].double()
    if counted.numel() < 2:
        raise ValueError(
            f"Whitening advantages needs at least 2 response tokens in the batch, got {counted.numel()}: "
            "raise data.train_batch_size, or use algorithm.adv_estimator=grpo or rloo."
        )
    white = (advantages.double() - counted.mean()) * (counted.var(unbiased=True) + 1e-8).rsqrt()
    return mask_response(white, mask).float()


def place_at_end(scores: Tensor, mask: Tensor) -> Tensor:
    """Return token rewards [B, T]: each response's score [B] on its last response token, 0 elsewhere."""
    empty = (mask.sum(-1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"Rows {empty} have no response token to assign the score to: drop empty responses first.")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask.bool(), positions, -1).amax(-1, keepdim=True)
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return rewards.scatter_(1, last, scores.float().unsqueeze(-1))


def _over_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    return mask_response(per_row.float().unsqueeze(-1).expand(mask.shape), mask)


def _centred(scores: Tensor, groups: Tensor, by_std: bool, n: int, weights: Tensor | None = None) -> Tensor:
    """Return scores [B] minus the group's (weighted) mean, divided by its std if `by_std`; float64.

    Groups of one: see `grpo`.
    """
    mean, size = _group_means(scores, groups)
    if weights is not None:
        mean = _group_sums(scores.double() * weights, groups)[0] / _group_sums(weights, groups)[0]
    alone = (size == 1) & (n == 1)
    centred = torch.where(alone, scores.double(), scores.double() - mean)
    if by_std:
        mean_square, _ = _group_means(centred.square(), groups)
        variance = mean_square * size / (size - 1).clamp(min=1)
        centred = centred / (torch.where(alone, torch.ones_like(variance), variance).sqrt() + 1e-6)
    return centred


def _group_means(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of `x` [B] over each row's group, and the size of that group, both [B] float64."""
    sums, size = _group_sums(x, groups)
    return sums / size, size


def _group_sums(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of `x` [B] over each row's group, and the size of that group, both [B] float64.

    Sums of float32 numbers are exact in float64, so equal scores have exactly their mean. In float32 the mean of three
    scores of 0.1 is not 0.1, and such a group would get advantages of about 0.01 after the division by its tiny
    deviation.
    """
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64, device=x.device).index_add_(0, index, x.double())
    return sums[index], counts[index].double()
