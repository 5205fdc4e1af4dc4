"""Register fusion policies together with the traits that tuning and the run need to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlfuse.fusion.decisions import Policy

TUNABLE = (
    "threshold",
    "max_decode_slowdown",
    "cost_gated",
    "longest_first",
    "max_sequences",
    "overlapping",
    "early_training",
)
"""`Settings` that simulation can tune."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy needs of those who run it."""

    tuned: tuple[str, ...] = ()  # the settings that it reads of those that are tuned by simulation
    trains_early: bool = False
    """It accumulates gradients while samples are still generated, where the algorithm allows that."""


REGISTERED: dict[Policy, Traits] = {}


def fusion_policy(tuned: tuple[str, ...] = (), trains_early: bool = False) -> Callable[[Policy], Policy]:
    """Register a policy with its traits; its name is the function's."""
    if unknown := [name for name in tuned if name not in TUNABLE]:
        raise ValueError(f"tuned={unknown}: no settings that are tuned; those are {', '.join(TUNABLE)}")

    def register(policy: Policy) -> Policy:
        REGISTERED[policy] = Traits(tuple(tuned), trains_early)
        return policy

    return register


def traits_of(policy: Policy) -> Traits:
    """Those it was registered with; none, if it was not."""
    return REGISTERED.get(getattr(policy, "function", policy), Traits())
