"""The contract of a rollout backend: the Ray actor around one engine, and how `rollout.name` selects its class.

Role: `RolloutHandle` calls these methods on the actor, `rlfuse.run` reads its traits and starts it. A backend is a
folder next to this one, of which the rest of the package uses the class in this table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from rlfuse.config.schema import Config, ModelConfig, RolloutConfig
from rlfuse.engines.memory.estimate import Memory
from rlfuse.engines.rollout.liveness import Pulse
from rlfuse.events import Span
from rlfuse.protocols import Load, Part, Sampling
from rlfuse.samples import Partial, Response, Sample, Visual

BACKENDS = {
    "vllm": "rlfuse.engines.vllm.rollout_worker:RolloutWorker",
    "transformers": "rlfuse.engines.transformers.transformers_engine:TransformersEngine",
}
"""`rollout.name` -> module and class of its `EngineActor`."""
EMPTY_PARTIAL = Partial(np.empty(0, np.int32), np.empty(0, np.float32), weight_version=-1)
"""What a sample that no engine has begun has."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine needs of a sample."""

    id: str
    step: int
    seed: int
    prompt_ids: np.ndarray
    partial: Partial
    visual: tuple[Visual, ...] = ()

    @classmethod
    def of(cls, sample: Sample, partial: Partial = EMPTY_PARTIAL) -> Request:
        """What is left of the sample to do."""
        return cls(sample.id, sample.step, sample.seed, sample.prompt.token_ids, partial, sample.prompt.visual)

    def ids(self) -> np.ndarray:
        """int32: what the sample has so far."""
        return np.concatenate([self.prompt_ids, self.partial.token_ids])


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond generating."""

    can_move_kv: bool
    """`evict(carry="kv")` keeps the KV cache, and another engine of the host loads it."""
    embeds: bool
    """Prompts may contain embeddings of clips and images."""


class EngineActor(Protocol):
    """One engine, created as an asyncio Ray actor of many concurrent calls.

    A sample's tokens depend on its seed and the position alone: not on the batch, the engine, or how often it moved.
    Every method may raise; `EngineLost` means that the engine is gone and its samples have to be generated elsewhere.
    """

    capabilities: Capabilities

    def __init__(self, slot: int) -> None: ...

    @staticmethod
    def environment(config: Config, device: str, slots: Sequence[int] = (0,)) -> dict[str, str]:
        """Environment variables of the actor's process, whose engine has these slots; called on the driver."""

    @staticmethod
    def unsupported_reasons(config: Config, trains: bool = True) -> list[str]:
        """Why this backend cannot run the job, one line per reason with its key; called before anything starts.
        `trains`: whether it is to take new weights."""

    @staticmethod
    def sized(rollout: RolloutConfig, memory: Memory) -> tuple[RolloutConfig, bool]:
        """Return the settings that this memory plan gives an engine on a GPU, and whether it may start while trainer
        ranks load models."""

    async def prepare(self, model: ModelConfig) -> None:
        """Import what `start` needs, without using the device."""

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict[str, Any]:
        """Load the model; return {start_s, kv_tokens, kv_bytes_per_token}. See `RolloutHandle.start`."""

    async def stop(self) -> None: ...

    async def pulse(self) -> Pulse:
        """Whether the engine makes progress; answered while it computes."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> AsyncIterator[list[tuple[str, Response | Partial]]]:
        """(sample id, response) in finishing order, a few at a time; a `Partial` for an evicted sample."""

    async def evict(self, sample_ids: Sequence[str], carry: str, calls: int) -> None:
        """End these samples of the first `calls` calls of `generate`; `carry`: `tokens` or `kv`."""

    async def load(self) -> Load: ...

    async def drain(self, collect: bool = False) -> list[Span]:
        """Spans since the last call: `generate` per sample, `decode` per stretch of steps, `update_weights`."""

    async def sleep(self, discard: bool = False) -> None:
        """Free the device. `discard`: new weights are pushed before anything is generated."""

    async def wake(self, part: Part | None = None) -> None: ...

    async def begin_update(self) -> None:
        """Pause, and drop everything that was computed with the old weights."""

    async def receive(self, info: dict[str, Any]) -> None:
        """Load a bucket: {"path": a safetensors file with checkpoint names}; on GPUs, see `cuda_ipc`."""

    async def finish_update(self, version: int) -> None:
        """All weights are here: resume, and recompute samples in flight under them."""

    async def version(self) -> int: ...


def engine_actor(name: str) -> type[EngineActor]:
    """The class that `rollout.name` selects."""
    module, _, found = BACKENDS[name].partition(":")
    return getattr(import_module(module), found)
