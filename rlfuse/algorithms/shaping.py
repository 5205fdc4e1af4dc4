"""What happens to rewards between the reward functions and the advantages: length penalty, spread, normalisation.

Role: called for every step, by `Experience` and by the metrics. The soft length penalty and leaving out groups without
spread are from DAPO (Yu et al. 2025, arXiv 2503.14476). No tensors; pure but for `Normaliser`, plain data that is saved
with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlfuse.samples import Reward


def overlong_penalty(
    response_lengths: Sequence[int] | np.ndarray, max_response_length: int, buffer_len: int, factor: float
) -> np.ndarray:
    """Reward to add to each response, float64 [samples], never positive; lengths in tokens.

    0 up to max_response_length - buffer_len, then linear to -factor at max_response_length, and no further. A buffer of
    0 tokens turns the penalty off.
    """
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer_len == 0:
        return np.zeros_like(lengths)
    return -factor * np.clip((lengths - (max_response_length - buffer_len)) / buffer_len, 0.0, 1.0)


def has_zero_std(rewards: Sequence[Sequence[float]], n: int) -> list[bool]:
    """For each group of rewards, True if they are all equal, so that group estimators learn nothing from it.

    Dynamic sampling replaces these groups, and their share is `reward/frac_reward_zero_std`. `n`: responses that were
    drawn for each prompt. Where it is 1 an advantage is the score, and only a group of none is True. What is left of a
    larger group where rewards failed is True if that is one or none.
    """
    return [(n > 1 and all(reward == group[0] for reward in group)) or not group for group in rewards]


class Normaliser:
    """Running mean and deviation of some functions' values, over all values since the run began.

    Only whole steps are learned, in the order of their samples: so what a value becomes does not depend on when, or
    beside which others, it was scored. Values of samples at which a gate closed do not count, since nobody was asked.
    """

    def __init__(self, names: Iterable[str] = ()):
        self._moments: dict[str, tuple[int, float, float]] = {name: (0, 0.0, 0.0) for name in names}
        """Function -> (values, their mean, sum of squared distances from it)."""

    @property
    def lacks_statistics(self) -> bool:
        """Some function's values have never been seen."""
        return any(count == 0 for count, _, _ in self._moments.values())

    def value(self, reward: Reward, weights: Mapping[str, float]) -> float:
        """A reward's value with these functions normalised; `weights` has one for each of its dimensions."""
        if not self._moments or reward.gate is not None:
            return reward.value
        return math.fsum(weights[name] * value for name, value in self.dimensions(reward).items())

    def dimensions(self, reward: Reward) -> dict[str, float]:
        """A reward's dimensions, those of these functions normalised."""
        if reward.gate is not None:
            return reward.dimensions
        return {name: self._normal(name, value) for name, value in reward.dimensions.items()}

    def update(self, rewards: Sequence[Reward]) -> dict[str, float]:
        """Take in the rewards of a whole step; returns reward/running_{mean,std}/{fn}."""
        metrics = {}
        for name in self._moments:
            values = [r.dimensions[name] for r in rewards if r.gate is None and name in r.dimensions]
            if values:
                self._moments[name] = _merged(self._moments[name], np.array(values, dtype=np.float64))
                _, mean, _ = self._moments[name]
                metrics |= {f"reward/running_mean/{name}": mean, f"reward/running_std/{name}": self._deviation(name)}
        return metrics

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {name: list(moments) for name, moments in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a checkpoint; functions that it does not know begin anew."""
        for name in self._moments.keys() & state.keys():
            count, mean, squares = state[name]
            self._moments[name] = (int(count), mean, squares)

    def _normal(self, name: str, value: float) -> float:
        count, mean, _ = self._moments.get(name, (0, 0.0, 0.0))
        return (value - mean) / (self._deviation(name) or 1.0) if count else value

    def _deviation(self, name: str) -> float:
        """0 where all values were equal, up to rounding."""
        count, mean, squares = self._moments[name]
        deviation = math.sqrt(squares / count)
        return deviation if deviation > 1e-6 * max(1.0, abs(mean)) else 0.0


def _merged(moments: tuple[int, float, float], values: np.ndarray) -> tuple[int, float, float]:
    """Moments of what was seen and `values` together (Chan, Golub and LeVeque 1979)."""
    count, mean, squares = moments
    total, shift = count + len(values), float(values.mean()) - mean
    more = float(np.square(values - values.mean()).sum()) + shift**2 * count * len(values) / total
    return total, mean + shift * len(values) / total, squares + more
