"""Traits of the built-in advantage estimators; custom ones state theirs in their decorator. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Of one estimator."""

    needs_groups: bool = False
    """It compares the responses to a prompt, so there have to be two or more."""
    needs_batch: bool = True
    """It reads rows of other groups, so it is called once per step, with the whole batch, and training waits for that.
    False: a row's result depends on the row's group alone, which the first step verifies for custom estimators."""
    needs_critic: bool = False
    each_reward: bool = False
    """It reads `dimensions` and `weights`, the reward functions one by one, in place of their sum."""
    whitens: str = ""
    """Its advantages are normalised over the whole batch afterwards, so the actor waits for the last sample: over
    `tokens`, of which long responses have more, or over `responses`, each with one advantage for all its tokens."""

    def __post_init__(self) -> None:
        if self.whitens not in ("", "tokens", "responses"):
            raise ValueError(f"whitens={self.whitens!r} has to be 'tokens' or 'responses'")
        for name in ("needs_groups", "needs_batch", "needs_critic", "each_reward"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} has to be True or False")


ESTIMATORS = {
    "gae": Traits(needs_batch=False, needs_critic=True, whitens="tokens"),
    "grpo": Traits(needs_groups=True, needs_batch=False),
    "gdpo": Traits(needs_groups=True, needs_batch=False, each_reward=True, whitens="responses"),
    "rloo": Traits(needs_groups=True, needs_batch=False),
    "reinforce_plus_plus": Traits(needs_batch=False, whitens="tokens"),
}


def in_words() -> str:
    """Their names, and what these mean where the names do not say it."""
    note = " (normalises each reward function by itself)"
    return " | ".join(name + note * traits.each_reward for name, traits in ESTIMATORS.items())
