"""What happens to rewards between the reward functions and the advantages: soft length penalty, groups without spread.

Role: called by the controller for every step. Both are from DAPO (Yu et al. 2025, arXiv 2503.14476). Pure, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlong_penalty(
    response_lengths: Sequence[int] | np.ndarray, max_response_length: int, buffer_len: int, factor: float
) -> np.ndarray:
    """Reward to add to each response, float64 [samples], never positive; lengths in tokens.

    0 up to max_response_length - buffer_len, then linear to -factor at max_response_length, and no further. A buffer of
    0 tokens turns the penalty off.
    """
    if not 0 <= buffer_len <= max_response_length:
        raise ValueError(
            f"reward.overlong_buffer.len={buffer_len} must be from 0 to data.max_response_length={max_response_length}."
        )
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer_len == 0:
        return np.zeros_like(lengths)
    return -factor * np.clip((lengths - (max_response_length - buffer_len)) / buffer_len, 0.0, 1.0)


def zero_spread(rewards: Sequence[Sequence[float]]) -> list[bool]:
    """For each group of rewards, True if they are all equal, so that group estimators learn nothing from it.

    Dynamic sampling replaces these groups, and their share is `reward/frac_reward_zero_std`. A group of one is False:
    it has nothing to be equal to, and its advantage is its score. A group of none (all failed) is True.
    """
    return [len(group) != 1 and all(reward == group[0] for reward in group) for group in rewards]
