"""Advantage estimators: from per-token rewards to how much better than expected each response token was.

Role: called by the controller once a step's rewards (and values) are there. Pure functions of padded tensors:
`[B, T]` float32, B responses of at most T tokens, `mask` [B, T] 1 on response tokens; rewards, values in reward units.
Invariants:
- what stands at masked-out positions, NaN included, changes nothing, and every result is 0 there;
- a masked-out position between response tokens is skipped, as if its neighbours were adjacent;
- a row's built-in estimate depends on the row's group only; whitened estimates, and custom ones unless they state
  otherwise, depend on the whole batch, so they can be computed only once all of it has arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlfuse.algorithms.losses import mask_response
from rlfuse.algorithms.registry import Registry, call, parameters

ESTIMATORS = Registry("algorithm.adv_estimator")
"""What each asks of a job, and which are to be whitened, stands in `config.estimators`."""


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
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each [B, T], by the estimator's name; those that are whitened are still to be.

    An estimator is given by name what it has parameters for: the arguments here, `scores` float32 [B], the sums of
    token rewards, and from `dimensions` the scores [B, K] of K rewards, NaN where one does not apply, and `weights`
    [K], both float32; without `dimensions` the score is the only one. It returns (advantages, returns), or one matrix
    that is both. `n`: responses drawn per prompt; a group has fewer where rewards failed.
    """
    function = ESTIMATORS.find(estimator)
    asked = parameters(function)
    if "values" in asked and values is None:
        raise ValueError(
            f"algorithm.adv_estimator={estimator} needs values, received None: run the critic before advantages."
        )
    if "groups" in asked and groups is None:
        raise ValueError(
            f"algorithm.adv_estimator={estimator} needs groups, received None: pass each row's group number."
        )
    # Token after token: the order of a plain sum, and so its last bit, depends on the width that rows are padded to.
    scores = mask_response(token_rewards, mask).double().cumsum(-1)[:, -1].float()
    columns, weights = dimensions or (scores[:, None], torch.ones(1))
    given = {"token_rewards": token_rewards, "scores": scores, "mask": mask, "groups": groups, "values": values}
    given |= {"dimensions": columns, "weights": weights, "gamma": gamma, "lam": lam, "by_std": by_std, "n": n}
    found = call(function, given)
    matrices = found if isinstance(found, tuple) and len(found) == 2 else (found, found)
    advantages, returns = (
        mask_response(ESTIMATORS.check_result(estimator, each, mask), mask).float() for each in matrices
    )
    return advantages, returns


@ESTIMATORS.built_in()
def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438), not whitened.

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
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300), [B, T].

    `scores` [B], `groups` [B] int. Score minus the group's mean, over the group's sample standard deviation (n - 1,
    plus 1e-6) when `by_std`; Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) leaves the deviation out. A group of one has
    nothing to be compared with: where `n` is 1, its advantage is its score; what is left of a larger group has none, as
    raw scores among centred ones would outweigh them all.
    """
    return _over_tokens(_centred(scores, groups, by_std, n), mask)


@ESTIMATORS.built_in()
def gdpo(dimensions: Tensor, weights: Tensor, groups: Tensor, mask: Tensor, by_std: bool, n: int = 1) -> Tensor:
    """Group reward-decoupled advantages (Liu et al. 2026, GDPO, arXiv 2601.05242), [B, T].

    `dimensions` [B, K]: scores of K rewards, NaN where a reward does not apply to a response; `weights` [K]. Each
    reward is compared within the group by itself, as by `grpo`, and only then are they added up with their weights, so
    that rewards of different ranges, and combinations with the same sum, stay apart. The paper's third step, over the
    batch, is `whiten` by response.
    """
    total = torch.zeros(len(dimensions), dtype=torch.float64, device=dimensions.device)
    for column, weight in zip(dimensions.double().T, weights.double(), strict=True):
        has = ~column.isnan()
        total[has] += weight * _centred(column[has], groups[has], by_std, n)
    return _over_tokens(total, mask)


@ESTIMATORS.built_in()
def rloo(scores: Tensor, groups: Tensor, mask: Tensor, n: int = 1) -> Tensor:
    """Leave-one-out advantages (Ahmadian et al. 2024, arXiv 2402.14740), [B, T].

    `scores` [B], `groups` [B] int. Score minus the mean score of the *other* responses of its group. A group of one has
    no others: as in `grpo`, its advantage is its score where `n` is 1, and 0 where its siblings are missing.
    """
    _, size = _group_means(scores, groups)
    # score - (sum - score) / (size - 1) = (score - mean) * size / (size - 1)
    return _over_tokens(_centred(scores, groups, False, n) * size / (size - 1).clamp(min=1), mask)


@ESTIMATORS.built_in()
def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): (advantages, returns), each [B, T], not whitened.

    The return of a token is the discounted sum of the rewards from it on; advantages are the returns, to be whitened
    over the batch. No critic, no groups.
    """
    rewards, keep = mask_response(token_rewards, mask), mask.bool()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(keep[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    returns = mask_response(returns, mask)
    return returns, returns


def whiten(advantages: Tensor, mask: Tensor, by_response: bool = False) -> Tensor:
    """Zero mean and unit variance over the batch, [B, T]; sample variance (n - 1) plus 1e-8.

    Over all response tokens, so that long responses count for more; `by_response` (gdpo): over responses, each of which
    has one advantage for all its tokens.
    """
    if by_response:
        counted = advantages.gather(1, mask.int().argmax(1, keepdim=True)).flatten().double()
    else:  # response tokens only, in order: padding cannot touch even the rounding
        counted = advantages[mask.bool()].double()
    if counted.numel() < 2:
        raise ValueError(
            f"Whitened advantages need at least 2 response tokens in the batch, received {counted.numel()}: "
            "raise data.train_batch_size, or use algorithm.adv_estimator=grpo or rloo."
        )
    white = (advantages.double() - counted.mean()) * (counted.var(unbiased=True) + 1e-8).rsqrt()
    return mask_response(white, mask).float()


def place_at_end(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T] with each response's score [B] on its last response token and 0 elsewhere."""
    empty = (mask.sum(-1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"Rows {empty} have no response token to carry their score: drop empty responses first.")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask.bool(), positions, -1).amax(-1, keepdim=True)
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return rewards.scatter_(1, last, scores.float().unsqueeze(-1))


def _over_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    return mask_response(per_row.float().unsqueeze(-1).expand(mask.shape), mask)


def _centred(scores: Tensor, groups: Tensor, by_std: bool, n: int) -> Tensor:
    """Scores [B] less their group's mean, over its deviation when `by_std`; float64. A group of one: see `grpo`."""
    mean, size = _group_means(scores, groups)
    alone = (size == 1) & (n == 1)
    centred = torch.where(alone, scores.double(), scores.double() - mean)
    if by_std:
        mean_square, _ = _group_means(centred.square(), groups)
        variance = mean_square * size / (size - 1).clamp(min=1)
        centred = centred / (torch.where(alone, torch.ones_like(variance), variance).sqrt() + 1e-6)
    return centred


def _group_means(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the mean of `x` [B] over the row's group and the size of that group, both [B] float64.

    In float64, since in float32 the mean of three scores of 0.1 is not 0.1, and a group without spread would get
    advantages of about 0.01 after division by its tiny deviation.
    """
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64, device=x.device).index_add_(0, index, x.double())
    return (sums / counts)[index], counts[index].double()
