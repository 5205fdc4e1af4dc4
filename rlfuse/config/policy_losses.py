"""Traits of policy losses; custom losses declare theirs in their decorator. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

DECORATOR = "policy_loss"


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Properties of one policy loss."""

    zero_without_advantage: bool = False
    """The loss of a row and its gradient are 0 if all its advantages are 0, and no row depends on the others. Then the
    actor's passes over such rows are skipped (actor.skip_zero_advantage)."""

    def __post_init__(self) -> None:
        if not isinstance(self.zero_without_advantage, bool):
            raise ValueError(f"zero_without_advantage={self.zero_without_advantage!r} must be True or False")


BUILT_IN = LossTraits(zero_without_advantage=True)
"""Traits of every built-in loss. kl_cov has another term, on the tokens that it selects."""
