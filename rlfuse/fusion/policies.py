"""The fusion policies: pure functions of a snapshot that decide when and where work runs, never what is computed."""

from __future__ import annotations

from rlfuse.fusion.adaptive import adaptive
from rlfuse.fusion.assignment import (
    admit,
    consolidate,
    prefetch_passes,
    score_passes,
    score_rewards,
    switch_idle_slots_to_trainer,
)
from rlfuse.fusion.decisions import Decision, Policy, Snapshot, fusion_policy
from rlfuse.fusion.serial import serial, train


@fusion_policy()
def stream(view: Snapshot) -> list[Decision]:
    """Score rewards immediately and passes on slots that finished generating; train after all scores."""
    admitted = admit(view)
    return (
        admitted
        + score_rewards(view)
        + switch_idle_slots_to_trainer(view)
        + (score_passes(view, admitted) or train(view) or prefetch_passes(view, admitted))
    )


@fusion_policy(tuned=("threshold", "max_decode_slowdown"))
def rlhfuse(view: Snapshot) -> list[Decision]:
    """Run `stream`, and consolidate the tail of long responses once (RLHFuse, arXiv 2409.13221)."""
    return consolidate(view) + stream(view)


POLICIES: dict[str, Policy] = {each.__name__: each for each in (serial, stream, rlhfuse, adaptive)}
"""The built-in policies, in the order of messages."""
