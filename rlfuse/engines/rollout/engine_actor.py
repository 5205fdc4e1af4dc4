"""Interface of a rollout backend: the Ray actor of one engine, and the table from `rollout.name` to its class.

Role: `rlfuse.run` reads the class attributes and starts the actor; `RolloutHandle` calls its methods. Each backend is a
package next to this one, and the rest of rlfuse uses only its class in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config, ModelConfig
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
"""The partial response of a sample that has not been started."""


@dataclass(frozen=True, slots=True)
class Request:
    """A sample as it is sent to an engine."""

    id: str
    step: int
    seed: int
    prompt_ids: np.ndarray
    partial: Partial
    visual: tuple[Visual, ...] = ()
    is_greedy: bool = False
    """It is decoded greedily, whatever the sampling of the call."""
    drafts: tuple[np.ndarray, ...] = ()
    """Earlier responses, see `Sample.drafts`."""

    @classmethod
    def of(cls, sample: Sample, partial: Partial = EMPTY_PARTIAL) -> Request:
        """Return the request that generates the rest of `sample` after `partial`."""
        prompt = sample.prompt
        flags = {"is_greedy": sample.is_baseline, "drafts": sample.drafts}
        return cls(sample.id, sample.step, sample.seed, prompt.token_ids, partial, prompt.visual, **flags)

    def ids(self) -> np.ndarray:
        """Return the tokens so far, int32: prompt and partial response."""
        return np.concatenate([self.prompt_ids, self.partial.token_ids])


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional features of a backend."""

    can_move_kv: bool
    """`evict(carry="kv")` keeps the KV cache, and another engine on the same host can load it."""
    accepts_embeddings: bool
    """Prompts may contain embeddings of video clips and images."""


class EngineActor(Protocol):
    """One engine, created as an asyncio Ray actor with a high max_concurrency.

    A sample's tokens depend only on its seed and the position, not on the batch, the engine or the number of
    migrations. Any method may raise; `EngineLost` means that the engine is gone and its samples must be generated
    elsewhere.
    """

    capabilities: Capabilities

    def __init__(self, slot: int) -> None: ...

    @staticmethod
    def environment(config: Config, device: str, slots: Sequence[int] = (0,)) -> dict[str, str]:
        """Return environment variables for the actor's process, whose engine uses `slots`; called on the driver."""

    @staticmethod
    def unsupported_reasons(config: Config, trains: bool = True) -> list[str]:
        """Return why this backend cannot run the job, one line per reason with its key; called before the run starts.
        `trains`: the engine will receive new weights."""

    @staticmethod
    def apply_memory_plan(rollout: RolloutConfig, memory: Memory) -> tuple[RolloutConfig, bool]:
        """Return the settings of an engine on a GPU under this memory plan, and whether it may start while trainer
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
        """Load the model; return {start_s, kv_tokens, kv_bytes_per_token}. Arguments: see `RolloutHandle.start`."""

    async def stop(self) -> None: ...

    async def pulse(self) -> Pulse:
        """Return whether the engine makes progress; answers while the engine computes."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> AsyncIterator[list[tuple[str, Response | Partial]]]:
        """Yield (sample id, response) in finishing order, in small lists; a `Partial` for an evicted sample."""

    async def evict(self, sample_ids: Sequence[str], carry: str, calls: int) -> None:
        """Stop these samples of the first `calls` calls of `generate`; `carry`: what to keep of them, `tokens` or
        `kv`."""

    async def load(self) -> Load: ...

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return the spans since the last call: `generate` per sample, `decode` per run of steps, `update_weights`.
        `collect`: run the garbage collector first."""

    async def sleep(self, discard: bool = False) -> None:
        """Free the device. `discard`: new weights are pushed before the next generation."""

    async def wake(self, part: Part | None = None) -> None: ...

    async def begin_update(self) -> None:
        """Pause generation and drop everything computed with the old weights."""

    async def receive(self, info: dict[str, Any]) -> None:
        """Load a bucket of weights: {"path": a safetensors file with checkpoint names}; on GPUs, see `cuda_ipc`."""

    async def finish_update(self, version: int) -> None:
        """Resume generation with the new weights; samples in flight are recomputed with them."""

    async def version(self) -> int: ...


def engine_actor(name: str) -> type[EngineActor]:
    """Return the actor class of the backend `name` (`rollout.name`)."""
    module, _, found = BACKENDS[name].partition(":")
    return getattr(import_module(module), found)
