"""Base of all rollout backends: admits requests, returns results in finishing order, counts versions, keeps spans.

Role: base class of the backends' actors. `generate` waits for its samples; closing the generator early evicts the rest.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from rlfuse import clock
from rlfuse.cluster import watchdog
from rlfuse.cluster.garbage import GarbageCollector
from rlfuse.engines.rollout.engine_actor import Request
from rlfuse.engines.rollout.liveness import Liveness, Pulse
from rlfuse.engines.rollout.step_meter import StepMeter
from rlfuse.events import Recorder, Span
from rlfuse.protocols import PARTS, Part, Sampling
from rlfuse.samples import Partial, Response

BATCHING_WINDOW_S = 0.005
"""Responses that finish within this time are sent in one message: each message costs the driver about a millisecond."""


class EngineBase(ABC):
    """Base class that implements `EngineActor`, except `start`, `stop`, `load`, `receive` and the abstract methods
    below."""

    _limit: int
    """Maximum tokens of a prompt and its response."""

    def __init__(self, slot: int, cpu: Callable[[], float]):
        """Create an engine for `slot`. `cpu`: returns the CPU seconds used by the engine, see `Liveness`."""
        self.name = f"rollout/{slot}"
        self._recorder = Recorder(self.name)
        self._garbage = GarbageCollector(self._recorder)
        watchdog.register(self.name, self._recorder)
        self._liveness = Liveness(cpu)
        self._meter: StepMeter | None = None
        self._tokenizer: Any = None
        self._active: dict[str, Any] = {}
        """Samples that are being generated, by id."""
        self._asleep: set[Part] = set()
        self._calls = self._steps = self._version = 0
        self._update: Span | None = None

    async def pulse(self) -> Pulse:
        self._garbage.collect_if_grown()
        return self._liveness.check_progress(self._is_busy())

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> AsyncIterator[list[tuple[str, Response | Partial]]]:
        self._calls += 1
        self._admit(requests)
        greedy = sampling.greedy()
        started = {self._start_sample(each, greedy if each.is_greedy else sampling): each.id for each in requests}
        waiting = dict(started)
        try:
            while waiting:
                _, running = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if running:
                    await asyncio.sleep(BATCHING_WINDOW_S)
                finished = [each for each in waiting if each.done()]
                yield [(waiting.pop(each), each.result()) for each in finished]
        finally:
            await self._stop_unfinished(started.keys())

    def _admit(self, requests: Sequence[Request]) -> None:
        """Validate all requests before admitting any."""
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep; wake it before submitting {len(requests)} samples")
        ids = {request.id for request in requests}
        if duplicates := sorted(ids & self._active.keys()) or ["repeated in this call"] * (len(ids) < len(requests)):
            raise ValueError(f"samples are already being generated ({duplicates}); submit each sample once")
        for request in requests:
            if (length := len(request.prompt_ids)) >= self._limit:
                visual_tokens = sum(len(each.positions) for each in request.visual)
                visual = f" ({visual_tokens} of them visual)" if visual_tokens else ""
                raise ValueError(
                    f"sample {request.id} has {length} prompt tokens{visual}, but prompt and response must fit into "
                    f"{self._limit}; raise data.max_prompt_length or shorten the prompt"
                )

    def _remaining_tokens(self, request: Request, sampling: Sampling) -> int:
        """Return the number of tokens that may still be generated."""
        return min(sampling.max_tokens, self._limit - len(request.prompt_ids)) - len(request.partial.token_ids)

    def _response(self, partial: Partial, reason: str) -> Response:
        text = self._tokenizer.decode(partial.token_ids.tolist(), skip_special_tokens=True)
        return Response(partial.token_ids, partial.log_probs, reason, partial.weight_version, text, partial.trainable)

    async def evict(self, sample_ids: Sequence[str], carry: str, calls: int) -> None:
        if carry not in ("tokens", "kv"):
            raise ValueError(f"carry={carry!r}: use tokens or kv")
        while self._calls < calls:  # this call arrived before its `generate` call
            await asyncio.sleep(0.001)
        await self._evict([sample_id for sample_id in sample_ids if sample_id in self._active], carry)

    async def sleep(self, discard: bool = False) -> None:
        if count := len(self._active):
            raise RuntimeError(
                f"{self.name} can't sleep while {count} samples are being generated; evict them or wait for them"
            )
        await self._free_device(discard)
        self._asleep = set(PARTS)

    async def wake(self, part: Part | None = None) -> None:
        waking = self._asleep & ({part} if part else self._asleep)
        if waking:
            await self._take_device(part)
        self._asleep -= waking

    async def drain(self, collect: bool = False) -> list[Span]:
        if self._meter is not None:
            self._meter.close()
        if collect:
            self._garbage.collect()
        return self._recorder.drain()

    async def version(self) -> int:
        return self._version

    def _pause(self) -> None:
        """Begin the `update_weights` span and pause the step meter."""
        self._update = Span("update_weights", self.name, clock.now(), cause="optimizer")
        self._meter.pause()

    def _finish_update_span(self, version: int) -> None:
        """End the span of the update: the engine now uses these weights."""
        self._version = version
        if self._update is not None:
            self._update.end, self._update.attributes["version"] = clock.now(), version
            self._recorder.add(self._update)

    # Methods of a backend ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _is_busy(self) -> bool:
        """Return whether the engine has work."""

    @abstractmethod
    def _start_sample(self, request: Request, sampling: Sampling) -> asyncio.Future:
        """Start a sample and add it to `_active` until it ends; return the future of its `Response`, or of its
        `Partial` if it is evicted."""

    @abstractmethod
    async def _stop_unfinished(self, started: Collection[asyncio.Future]) -> None:
        """Stop the unfinished samples of a call of `generate`."""

    @abstractmethod
    async def _evict(self, sample_ids: list[str], carry: str) -> None:
        """Stop these active samples; return when they have ended."""

    async def _free_device(self, discard: bool) -> None:  # noqa: B027  (optional)
        """Free the device's memory; a no-op on CPU hosts."""

    async def _take_device(self, part: Part | None) -> None:  # noqa: B027
        """Allocate the device's memory again, or only that of `part`."""
