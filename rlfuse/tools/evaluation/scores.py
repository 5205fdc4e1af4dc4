"""Score statistics of held-out prompts: means, pass@k, lengths, per data source and overall. Pure.

A score is `acc` if any sample of the data source has one, else the reward. Failed rewards are counted and excluded.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlfuse.observe.best_of_n import best_at, majority_at
from rlfuse.samples import Group, Reward, Sample

ALL = "all"
LENGTHS = ("mean", "median", "p95", "max")
ACC, REWARD = "acc", "reward"


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Estimate pass@k without bias: 1 - C(n - c, k) / C(n, k), c = `passed` (Chen et al., arXiv 2107.03374)."""
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be 1 to n={n}")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - passed + 1, n + 1))


def k_values(n: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... and n."""
    return sorted({n, *(1 << power for power in range(n.bit_length()) if 1 << power <= n)})


def scores_of(groups: Sequence[Group]) -> list[list[float]]:
    """Return, per group, the scores of its samples that have a reward."""
    with_acc = {group.prompt.data_source for group in groups if any(each.accuracies for each in _rewards([group]))}
    return [
        [
            (reward.accuracy or 0.0) if group.prompt.data_source in with_acc else float(reward.value)
            for reward in _rewards([group])
        ]
        for group in groups
    ]


def score_name(groups: Sequence[Group]) -> str:
    """Return the name of the score of these samples."""
    if several := averaged_parts(groups):
        return f"mean of {' and '.join(several)}"
    return ACC if any(reward.accuracies for reward in _rewards(groups)) else REWARD


def averaged_parts(groups: Sequence[Group]) -> list[str]:
    """Return the parts whose mean is the score if any sample has more than one `acc`, else []."""
    given = [reward.accuracies for reward in _rewards(groups) if len(reward.accuracies) > 1]
    return list(dict.fromkeys(name for names in given for name in names))


def _rewards(groups: Sequence[Group]) -> list[Reward]:
    rewards = [sample.reward for group in groups for sample in group.samples]
    return [reward for reward in rewards if isinstance(reward, Reward)]


def statistics_by_source(groups: Sequence[Group], threshold: float) -> dict[str, dict[str, Any]]:
    """Return {data_source: statistics}. With several sources the last entry covers all of them, under a unique name."""
    sources, total = list(dict.fromkeys(group.prompt.data_source for group in groups)), ALL
    found = {
        source: score_statistics([group for group in groups if group.prompt.data_source == source], threshold)
        for source in sources
    }
    while total in found:  # a data source has this name
        total += " sources"
    return found if len(sources) == 1 else found | {total: score_statistics(groups, threshold)}


def score_statistics(groups: Sequence[Group], threshold: float) -> dict[str, Any]:
    """Return score statistics. `stderr`: standard error of the mean over prompts; pass@k: prompts with >= k scores."""
    samples = [sample for group in groups for sample in group.samples]
    scored = [values for values in scores_of(groups) if values]
    lengths = [sample.response.length for sample in samples]
    passed = [(len(values), sum(value > threshold for value in values)) for values in scored]
    most = max((count for count, _ in passed), default=0)
    means = [float(np.mean(values)) for values in scored]
    return {
        "prompts": len(groups),
        "samples": len(samples),
        "failed": len(samples) - sum(map(len, scored)),
        "reward": _mean([s.reward.value for s in samples if isinstance(s.reward, Reward)]),
        "score": _mean([value for values in scored for value in values]),
        "stderr": float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
        "pass@k": {
            k: _mean([pass_at_k(n, c, k) for n, c in passed if n >= k]) for k in (k_values(most) if most else ())
        },
        **_of_several_responses(groups, scored, most),
        "finish": dict(Counter(sample.response.finish_reason for sample in samples)),
        "length": _lengths(lengths),
        **_parts(samples),
    }


def _of_several_responses(groups: Sequence[Group], scored: Sequence[Sequence[float]], n: int) -> dict[str, Any]:
    """Return `best@n` and `maj@n` (null without answers) of `n` responses drawn with replacement, as a validation."""
    answered = [[each.pred for each in _rewards([group])] for group in groups]
    answered = [answers for answers in answered if answers]
    votes = any(answer is not None for answers in answered for answer in answers)
    majority = [majority_at(*each, n) for each in zip(scored, answered, strict=True)] if votes else []
    return {"best@n": _mean([best_at(each, n) for each in scored]), "maj@n": _mean(majority)}


def _lengths(lengths: Sequence[int]) -> Mapping[str, float]:
    return {
        "mean": float(np.mean(lengths)),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "max": int(max(lengths)),
    }


def _parts(samples: Sequence[Sample]) -> dict[str, dict[str, float | None]]:
    """Return mean and coverage of each part over the data sources that have it; a missing part counts as 0."""
    found: dict[str, dict[str, float | None]] = {"parts": {}, "coverage": {}}
    sources: dict[str, dict[str, None]] = defaultdict(dict)
    for sample in samples:
        if isinstance(sample.reward, Reward):
            for name in sample.reward.parts:
                sources[name][sample.prompt.data_source] = None
    for name, having in sources.items():
        rewards = [sample.reward for sample in samples if sample.prompt.data_source in having]
        parts = [reward.parts for reward in rewards if isinstance(reward, Reward)]
        found["parts"][name] = _mean([each.get(name, 0.0) for each in parts])
        found["coverage"][name] = sum(name in each for each in parts) / len(rewards)
    return found


def _mean(values: Sequence[float]) -> float | None:
    mean = float(np.mean(values)) if values else math.nan
    return mean if math.isfinite(mean) else None
