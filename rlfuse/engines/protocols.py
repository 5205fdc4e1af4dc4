"""What the controller knows of engines: small async protocols, implemented by Ray actors and by the simulator alike.

Invariants: every method is bounded in time by its implementation and raises `EngineError` naming the worker; results
come back in the order of the arguments; no method changes the samples it is given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from rlfuse.observe.events import Span
from rlfuse.samples import Response, Reward, RewardFailure, Row, Sample


class EngineError(RuntimeError):
    """A worker failed. The message says which one, what it was doing and what to do; `__cause__` is the original."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn; the seed belongs to the sample."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a rollout engine holds right now."""

    running: int
    waiting: int
    kv_use: float
    """Share of the KV cache in use, 0 to 1."""


class Recorded(Protocol):
    """Every engine keeps spans of its work until they are drained."""

    async def drain(self) -> list[Span]: ...


class RolloutEngine(Recorded, Protocol):
    """One vLLM engine on one slot."""

    def generate(self, samples: Sequence[Sample], sampling: Sampling) -> AsyncIterator[tuple[str, Response]]:
        """(sample id, response) for each sample, in finishing order, as soon as each is finished."""

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """End these samples now; `generate` yields them with what they have and finish_reason `abort`."""

    async def load(self) -> Load: ...


class RewardScorer(Recorded, Protocol):
    """Reward functions and reward models in processes of their own."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]: ...


class Trainer(Recorded, Protocol):
    """Actor, critic and reference over all trainer ranks."""

    async def log_probs(self, model: str, rows: Sequence[Row]) -> list[np.ndarray]:
        """float32 [T] per row of the response tokens under `actor` or `ref`, at the sampling temperature."""

    async def values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """float32 [T] per row: the critic's value of the state before each response token."""

    async def update_actor(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer step on one mini-batch; rows carry `old_log_probs`, `advantages` (and what the loss needs)."""

    async def update_critic(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer step on one mini-batch; rows carry `values` and `returns`."""

    async def save(self, folder: Path) -> None:
        """Write `actor/` (with `huggingface/` inside) and `critic/` below `folder`."""

    async def load(self, folder: Path) -> None: ...


class WeightSync(Protocol):
    """From the trainer's actor to every rollout engine."""

    async def push(self, version: int) -> None:
        """All engines hold the actor's present weights as `version` when this returns; caches are reset."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The hands of the controller."""

    rollout: Sequence[RolloutEngine]
    reward: RewardScorer
    trainer: Trainer
    weights: WeightSync
