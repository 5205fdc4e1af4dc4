"""The driver's handle of one rollout engine.

Role: implements the controller's `RolloutEngine` and the weight sync's `WeightReceiver` over the actor of
`rlfuse.engines.rollout`. Every remote call is bounded by `timeout_s`; a dead actor raises at once, naming itself and
what it was asked to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray

from rlfuse.cluster.remote import call, explain
from rlfuse.config.schema import ModelConfig, RolloutConfig
from rlfuse.engines.protocols import EngineError, Load, Sampling
from rlfuse.engines.rollout_start import NOTHING, Request
from rlfuse.observe import watchdog
from rlfuse.observe.events import Span
from rlfuse.samples import Partial, Response, Sample


class RolloutHandle:
    """The driver's side of one engine. `devices`: how many it spans (tensor parallel)."""

    def __init__(self, actor: ray.actor.ActorHandle, name: str, timeout_s: float, devices: int = 1):
        self.actor, self.name, self.timeout_s, self.devices = actor, name, timeout_s, devices
        self._calls = 0

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict:
        """Start the engine; returns {start_s, kv_tokens, kv_bytes_per_token}.

        `max_model_len`: the longest prompt plus the longest response, in tokens. `tail_speculation`: draft tokens ahead
        while at most so many samples are left, 0 never. `core`: of a CPU host, to bind all the engine's threads to.
        """
        more = (device, tail_speculation, core)
        return await self._call("start", "start its engine", model, rollout, max_model_len, *more)

    async def generate(
        self, samples: Sequence[Sample], sampling: Sampling, partials: Mapping[str, Partial] | None = None
    ) -> AsyncIterator[tuple[str, Response | Partial]]:
        """(sample id, response) for each sample, in finishing order; leaving early evicts the rest.

        `partials`: sample id -> what it has already; its response holds that too. An evicted sample comes as `Partial`.
        """
        requests = [Request.of(sample, (partials or {}).get(sample.id, NOTHING)) for sample in samples]
        action = f"generate {len(requests)} samples"
        self._calls += 1
        stream = self.actor.generate.options(num_returns="streaming").remote(requests, sampling)
        open_ids = {request.id for request in requests}
        try:
            while open_ids:
                for sample_id, result in await self._next(stream, action):
                    open_ids.discard(sample_id)
                    yield sample_id, result
        finally:
            if open_ids:
                self.actor.evict.remote(sorted(open_ids), "tokens", self._calls)

    async def _next(self, stream: Any, action: str) -> list[tuple[str, Response | Partial]]:
        try:
            with watchdog.waiting(self.name, action, self.timeout_s):
                reference = await asyncio.wait_for(anext(stream), self.timeout_s)
        except StopAsyncIteration:
            raise EngineError(f"{self.name} ended its stream before it finished to {action}") from None
        except Exception as error:
            raise explain(error, self.name, action, self.timeout_s) from error
        return await call(reference, self.name, action, self.timeout_s)

    async def evict(self, sample_ids: Sequence[str], carry: str = "tokens") -> None:
        """End these samples here now; `generate` yields a `Partial` for each that isn't finished.

        `carry`: `kv` puts their KV cache where the run's other engines on this host find it, `tokens` lets it go.
        """
        await self._call("evict", f"evict {len(sample_ids)} samples", list(sample_ids), carry, self._calls)

    async def load(self) -> Load:
        """What the engine holds right now."""
        return await self._call("load", "report its load")

    async def drain(self) -> list[Span]:
        """Spans since the last call."""
        return await self._call("drain", "hand over its events")

    async def sleep(self) -> None:
        """Give the device up; `EngineError` while samples are active."""
        await self._call("sleep", "give its device up")

    async def wake(self) -> None:
        """Take the device back; nothing may be generated before."""
        await self._call("wake", "take its device back")

    async def stop(self) -> None:
        """End the engine's processes; the actor stays."""
        await self._call("stop", "stop its engine")

    async def join_transfer(self, info: dict[str, Any]) -> None:
        """Join the trainer's process group (nccl)."""
        await self._call("join_transfer", "join the trainer's process group", info)

    async def begin_update(self) -> None:
        """Pause and clear caches."""
        await self._call("begin_update", "pause for new weights")

    async def receive(self, info: dict[str, Any]) -> None:
        """Load one bucket."""
        await self._call("receive", "load a bucket of weights", info)

    async def finish_update(self, version: int) -> None:
        """Resume with the new weights."""
        await self._call("finish_update", f"take weights as version {version}", version)

    async def version(self) -> int:
        """The version of the engine's weights."""
        return await self._call("version", "report its weights' version")

    async def _call(self, method: str, action: str, *arguments: Any) -> Any:
        return await call(getattr(self.actor, method).remote(*arguments), self.name, action, self.timeout_s)
