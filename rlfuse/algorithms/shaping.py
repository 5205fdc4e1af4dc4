"""Reward shaping before the advantages: overlong penalty, groups without variance, running normalisation.

The soft overlong penalty and dynamic sampling (dropping groups of equal rewards) are from DAPO (Yu et al. 2025, arXiv
2503.14476).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlfuse.samples import Reward


def overlong_penalty(
    response_lengths: Sequence[int] | np.ndarray, max_response_length: int, buffer_len: int, factor: float
) -> np.ndarray:
    """Return DAPO's soft overlong penalty of each response, float64 [samples], <= 0; lengths in tokens.

    It is 0 up to max_response_length - buffer_len, then falls linearly to -factor at max_response_length, its minimum.
    A buffer of 0 tokens disables it.
    """
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer_len == 0:
        return np.zeros_like(lengths)
    return -factor * np.clip((lengths - (max_response_length - buffer_len)) / buffer_len, 0.0, 1.0)


def has_zero_std(rewards: Sequence[Sequence[float]], n: int) -> list[bool]:
    """Return for each group whether all its rewards are equal, so that its group-relative advantages are 0.

    Dynamic sampling replaces such groups; their fraction is `reward/frac_reward_zero_std`. `n`: responses sampled per
    prompt. With `n` = 1 advantages are the scores, and only empty groups are True. If rewards failed, a larger group
    with one response or none left is True.
    """
    return [(n > 1 and all(reward == group[0] for reward in group)) or not group for group in rewards]


class Normaliser:
    """Running mean and standard deviation of reward functions' values since the run began.

    Statistics are updated by whole steps, in sample order, so results do not depend on the order of scoring. Samples
    stopped by a gate are ignored, since their other reward functions were not called.
    """

    def __init__(self, names: Iterable[str] = ()):
        self._moments: dict[str, tuple[int, float, float]] = {name: (0, 0.0, 0.0) for name in names}
        """Function -> (count of values, mean, sum of squared deviations)."""

    @property
    def lacks_statistics(self) -> bool:
        """True if a function has no statistics yet."""
        return any(count == 0 for count, _, _ in self._moments.values())

    def value(self, reward: Reward, weights: Mapping[str, float]) -> float:
        """Return a reward's value with normalised dimensions; `weights` has an entry for each dimension."""
        if not self._moments or reward.gate is not None:
            return reward.value
        return math.fsum(weights[name] * value for name, value in self.dimensions(reward).items())

    def dimensions(self, reward: Reward) -> dict[str, float]:
        """Return a reward's dimensions, normalised if the function is tracked."""
        if reward.gate is not None:
            return reward.dimensions
        return {name: self._normal(name, value) for name, value in reward.dimensions.items()}

    def update(self, rewards: Sequence[Reward]) -> dict[str, float]:
        """Update the statistics with the rewards of a whole step; return reward/running_{mean,std}/{fn}."""
        metrics = {}
        for name in self._moments:
            values = [r.dimensions[name] for r in rewards if r.gate is None and name in r.dimensions]
            if values:
                self._moments[name] = _merged(self._moments[name], np.array(values, dtype=np.float64))
                _, mean, _ = self._moments[name]
                metrics |= {f"reward/running_mean/{name}": mean, f"reward/running_std/{name}": self._deviation(name)}
        return metrics

    def state_dict(self) -> dict[str, list[float]]:
        """Return the checkpoint state."""
        return {name: list(moments) for name, moments in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the statistics; functions missing from the checkpoint start from scratch."""
        for name in self._moments.keys() & state.keys():
            count, mean, squares = state[name]
            self._moments[name] = (int(count), mean, squares)

    def _normal(self, name: str, value: float) -> float:
        count, mean, _ = self._moments.get(name, (0, 0.0, 0.0))
        return (value - mean) / (self._deviation(name) or 1.0) if count else value

    def _deviation(self, name: str) -> float:
        """Return the standard deviation; 0 if all values are equal up to rounding."""
        count, mean, squares = self._moments[name]
        deviation = math.sqrt(squares / count)
        return deviation if deviation > 1e-6 * max(1.0, abs(mean)) else 0.0


def _merged(moments: tuple[int, float, float], values: np.ndarray) -> tuple[int, float, float]:
    """Merge moments with those of `values` (Chan, Golub and LeVeque 1979)."""
    count, mean, squares = moments
    total, shift = count + len(values), float(values.mean()) - mean
    more = float(np.square(values - values.mean()).sum()) + shift**2 * count * len(values) / total
    return total, mean + shift * len(values) / total, squares + more
