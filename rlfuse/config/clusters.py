"""The group `cluster`: where a run lives, how long it waits for workers and how many it may lose.

A part of the schema, whose rules hold here too (`schema.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ClusterConfig:
    """Ray and the devices it places work on."""

    device: str = "auto"
    """What the run works on:"""
    ray_address: str | None = None
    """A running Ray cluster (`auto` or host:port); null starts one for this run."""
    timeout_s: float = 1800.0
    """Longest time that a worker's start or one remote call may take, and a restarted run waits for lost nodes."""
    heartbeat_s: float = 60.0
    """A rollout engine that for so long does not answer, or stands still with samples at hand, is killed and replaced;
    one that computes may take longer."""
    max_restarts: int = 3
    """Times that each rollout engine is replaced when it is lost, and that the run restarts from its last checkpoint
    when a trainer rank is; 0: the first such loss ends the run."""
