"""Traits of the built-in advantage estimators; custom estimators declare theirs in their decorator. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Requirements and properties of one estimator."""

    needs_groups: bool = False
    """It compares the responses of a group, so rollout.n must be 2 or more."""
    needs_batch: bool = True
    """It reads rows of other groups, so it is called once per step with the whole batch, and training waits for it.
    False: a row's result depends only on its group; the first step verifies this for custom estimators."""
    needs_critic: bool = False
    needs_baseline: bool = False
    """It reads the score of a greedy response to each prompt (`baselines`), which is generated with the others."""
    needs_reference: bool = False
    """It compares the log-probs of policy and reference, so both are computed before the first update."""
    needs_rewards: bool = True
    """False: it ignores the rewards, so reward.functions may be empty, and rewards are only logged."""
    each_reward: bool = False
    """It reads the values of each reward function (`dimensions`, `weights`) instead of their sum."""
    whitens: str = ""
    """`tokens` or `responses`: its advantages are whitened over the whole batch afterwards, so the actor waits for the
    last sample. Over `responses`, each response has one advantage for all its tokens."""

    def __post_init__(self) -> None:
        if self.whitens not in ("", "tokens", "responses"):
            raise ValueError(f"whitens={self.whitens!r} must be 'tokens' or 'responses'")
        switches = ("needs_groups", "needs_batch", "needs_critic", "needs_baseline", "needs_reference", "needs_rewards")
        for name in (*switches, "each_reward"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.needs_baseline and not self.needs_rewards:
            raise ValueError("needs_rewards=False must be True with needs_baseline=True, which reads a score")


ESTIMATORS = {
    "gae": Traits(needs_batch=False, needs_critic=True, whitens="tokens"),
    "grpo": Traits(needs_groups=True, needs_batch=False),
    "gdpo": Traits(needs_groups=True, needs_batch=False, each_reward=True, whitens="responses"),
    "rloo": Traits(needs_groups=True, needs_batch=False),
    "remax": Traits(needs_batch=False, needs_baseline=True),
    "opo": Traits(needs_groups=True, needs_batch=False),
    "gpg": Traits(needs_groups=True),
    "reinforce_plus_plus": Traits(needs_batch=False, whitens="tokens"),
    "reinforce_plus_plus_baseline": Traits(needs_groups=True, needs_batch=False, whitens="tokens"),
    "distill": Traits(needs_batch=False, needs_reference=True, needs_rewards=False),
}


def describe_choices() -> str:
    """Return the names of the estimators, with explanations in parentheses."""
    notes = {
        "gdpo": " (normalises each reward function separately)",
        "remax": " (generates a greedy baseline)",
        "distill": " (log-prob of the teacher, ref.path)",
    }
    return " | ".join(name + notes.get(name, "") for name in ESTIMATORS)
