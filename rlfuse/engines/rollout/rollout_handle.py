"""The driver's handle of one rollout engine; it outlives the engine and replaces it when it is lost.

    generate, evict, ... --> actor          _watch --pulse--> actor
          | EngineLost <-- _lose <------------- | no answer, stalled
          +--> _restart: a new actor starts --> wait_ready <-- WeightPush: begin_update, receive, finish_update

An engine is lost if its process died, or if it did not answer or made no progress for `heartbeat_s` despite having
work; then every call raises `EngineLost`. One that failed with an exception (`EngineFailed`) is replaced, unless its
replacement fails with the same exception. A replacement generates only after `finish_update`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from rlfuse import clock
from rlfuse.cluster import watchdog
from rlfuse.cluster.nodes import from_head
from rlfuse.cluster.remote import call, explain, is_death
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import ModelConfig
from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
from rlfuse.engines.rollout.liveness import Pulse
from rlfuse.errors import EngineError, EngineFailed, EngineLost, WorkerLost
from rlfuse.events import Recorder, Span
from rlfuse.protocols import PARTS, Load, Part, Sampling
from rlfuse.samples import Partial, Response, Sample


class RolloutHandle:
    """Handle of one engine on the driver.

    `create` starts its actor; `max_restarts`: maximum number of replacements; `starts_immediately`: the slot has memory
    for a replacement to start while the trainer rank works, otherwise it starts with the next weight push; `recorder`
    and `say` report losses.
    """

    def __init__(
        self,
        create: Callable[[], ray.actor.ActorHandle],
        name: str,
        timeout_s: float,
        heartbeat_s: float = 60.0,
        max_restarts: int = 0,
        starts_immediately: bool = True,
        recorder: Recorder | None = None,
        say: Callable[[str], None] = lambda _: None,
    ):
        self.name, self.timeout_s, self.heartbeat_s = name, timeout_s, heartbeat_s
        self.actor = create()
        self.restarts = 0
        self._create, self._max_restarts, self._starts_immediately = create, max_restarts, starts_immediately
        self._recorder, self._say = recorder or Recorder("driver"), say
        self._arguments: tuple[Any, ...] = ()
        self._calls = 0
        self._pending: set[str] = set()
        """Ids of submitted samples without a result."""
        self._lost: EngineLost | None = None
        self._failures: set[str] = set()
        """Errors of earlier engines, with numbers replaced."""
        self._repeated = False
        """True if the last engine failed with one of them."""
        self._lost_actor: ray.actor.ActorHandle | None = None
        """The last actor that was declared lost."""
        self._asleep: set[Part] | None = None
        """Sleeping parts; None: unknown."""
        self._push_actor: ray.actor.ActorHandle | None = None
        """The actor that the current push began with."""
        self._restart: asyncio.Task | None = None
        self._watcher: asyncio.Task | None = None
        self._last_pulse: Pulse

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict:
        """Start the engine; return {start_s, kv_tokens, kv_bytes_per_token}.

        `max_model_len`: longest prompt plus longest response. `tail_speculation`: use speculative decoding while at
        most this many samples are left. `core`: CPU core of all engine threads, on CPU hosts.
        """
        self._arguments = (model, rollout, max_model_len, device, tail_speculation, core)
        return await self._start_engine()

    async def _start_engine(self) -> dict:
        action = "start its engine"
        facts = await call(self.actor.start.remote(*self._arguments), self.name, action, self.timeout_s)
        self._asleep = set()
        self._last_pulse = Pulse(0.0, "its start")
        self._watcher = asyncio.create_task(self._watch(self.actor), name=f"watch {self.name}")
        return facts

    async def stop(self) -> None:
        """Stop the engine's processes; the actor stays alive."""
        for task in (self._watcher, self._restart):
            if task is not None:
                task.cancel()
        if self._lost is None:
            await self._call("stop", "stop its engine")

    # Generation ------------------------------------------------------------------------------------------------------

    async def generate(
        self, samples: Sequence[Sample], sampling: Sampling, partials: Mapping[str, Partial] | None = None
    ) -> AsyncIterator[tuple[str, Response | Partial]]:
        """Yield (sample id, response) in finishing order; closing the generator early evicts the rest.

        `partials`: sample id -> partial response to continue. An evicted sample yields a `Partial`. Raises EngineLost
        if the engine is gone; the remaining samples must then be generated elsewhere.
        """
        self._check()
        requests = [Request.of(sample, (partials or {}).get(sample.id, EMPTY_PARTIAL)) for sample in samples]
        action = f"generate {len(requests)} samples"
        self._calls += 1
        actor, stream = self.actor, self.actor.generate.options(num_returns="streaming").remote(requests, sampling)
        pending_ids = {request.id for request in requests}
        self._pending |= pending_ids
        try:
            while pending_ids:
                for sample_id, result in await self._next(actor, stream, action):
                    pending_ids.discard(sample_id)
                    self._pending.discard(sample_id)
                    yield sample_id, result
        finally:
            if pending_ids and self._lost is None and actor is self.actor:
                self._pending -= pending_ids
                actor.evict.remote(sorted(pending_ids), "tokens", self._calls)

    async def _next(self, actor: ray.actor.ActorHandle, stream: Any, action: str) -> list:
        try:
            with watchdog.waiting(self.name, action, self.timeout_s):
                reference = await asyncio.wait_for(anext(stream), self.timeout_s)
        except StopAsyncIteration:
            raise EngineError(f"{self.name} closed its stream before it finished the call: {action}") from None
        except Exception as error:
            raise self._to_engine_lost(explain(error, self.name, action, self.timeout_s), actor) from error
        results = await self._answer(actor, reference, action)
        if actor is not self.actor:
            raise EngineLost(f"{self.name} was replaced during the call: {action}")
        self._check()
        return results

    async def evict(self, sample_ids: Sequence[str], carry: str = "tokens") -> None:
        self._check()
        await self._call("evict", f"evict {len(sample_ids)} samples", list(sample_ids), carry, self._calls)

    async def load(self) -> Load:
        self._check()
        return await self._call("load", "report its load")

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return the spans since the last call, none for a lost engine; `collect`: run the garbage collector first."""
        with suppress(EngineLost):
            self._check()
            return await self._call("drain", "return its events", collect)
        return []

    async def sleep(self, discard: bool = False) -> None:
        """Free the device, if it is not yet free. Raises `EngineError` while samples are active. `discard`: the next
        push overwrites the weights before the next generation."""
        await self._set_asleep({*PARTS}, "sleep", "free its device", discard)

    async def wake(self, part: Part | None = None) -> None:
        """Allocate the device's memory again, or only that of `part`."""
        asleep = ({*PARTS} if self._asleep is None else self._asleep) - ({part} if part else {*PARTS})
        which = f" for its {part}" if part else ""
        await self._set_asleep(asleep, "wake", f"allocate device memory{which}", part)

    async def _set_asleep(self, asleep: set[Part], method: str, action: str, *arguments: Any) -> None:
        """Put exactly these parts to sleep, unless they already are."""
        if self._has_engine and self._asleep != asleep:
            self._asleep = None
            with suppress(EngineLost):
                await self._call(method, action, *arguments)
                self._asleep = asleep

    # Weights ---------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        self._push_actor = self.actor if self._has_engine else None
        await self._call_in_push("begin_update", "pause for new weights")

    async def receive(self, info: dict[str, Any]) -> None:
        await self._call_in_push("receive", "load a bucket of weights", info)

    async def finish_update(self, version: int) -> None:
        """Resume with the new weights; a replacement engine generates from now on."""
        await self._call_in_push("finish_update", f"finish the update to version {version}", version)
        self._lost = self._restart = None

    async def version(self) -> int:
        self._check()
        return await self._call("version", "report its weights' version")

    async def _call_in_push(self, method: str, action: str, *arguments: Any) -> None:
        """Call the actor as part of a push. Raises EngineLost if the engine was replaced since the push began."""
        self._check_push_actor(action)
        await self._call(method, action, *arguments)
        self._check_push_actor(action)

    def _check_push_actor(self, action: str) -> None:
        if self._push_actor is not self.actor or self._push_actor is self._lost_actor:
            raise EngineLost(f"{self.name} was lost during the push: {action}")

    async def _call(self, method: str, action: str, *arguments: Any) -> Any:
        return await self._answer(self.actor, getattr(self.actor, method).remote(*arguments), action)

    async def _answer(self, actor: ray.actor.ActorHandle, reference: ray.ObjectRef, action: str) -> Any:
        try:
            return await call(reference, self.name, action, self.timeout_s)
        except WorkerLost as error:
            raise self._to_engine_lost(error, actor) from error

    # Loss and replacement --------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """True from the loss of an engine until its replacement has received weights."""
        return self._lost is not None

    @property
    def _has_engine(self) -> bool:
        """True if the engine is alive or its replacement has started."""
        restart = self._restart
        return self._lost is None or (restart is not None and restart.done() and not restart.exception())

    async def wait_ready(self) -> None:
        """Wait until there is an engine to push weights to. Raises EngineError if none can be started, or the limit of
        restarts is reached."""
        if self._lost is not None:
            await (self._restart or self._replace())

    def _check(self) -> None:
        if self._lost is not None:
            raise EngineLost(str(self._lost))

    def _to_engine_lost(self, error: BaseException, actor: ray.actor.ActorHandle) -> BaseException:
        """Return the error to raise for a failed call: `EngineLost` if the engine is gone."""
        if not isinstance(error, WorkerLost):
            return error
        self._lose(actor, str(error), failed=isinstance(error, EngineFailed))
        return EngineLost(str(self._lost or error))

    def _lose(self, actor: ray.actor.ActorHandle, why: str, failed: bool = False) -> None:
        """Declare this actor lost and kill it, once. `failed`: the engine raised an exception."""
        if actor is not self.actor or actor is self._lost_actor:
            return
        self._lost_actor, now, samples = actor, clock.now(), tuple(sorted(self._pending))
        self._lost, self._restart, self._pending = EngineLost(why), None, set()
        if failed:
            failure = re.sub(r"0x[0-9a-f]+|\d+", "#", why)
            self._repeated = failure in self._failures
            self._failures.add(failure)
        self._recorder.add(Span("lost", self.name, now, now, samples=samples, cause=why))
        ray.kill(actor)
        outlook = "No replacement is started." if self._no_replacement_reason else "A replacement is starting."
        self._say(f"lost: {why}\n{self.name}: its {len(samples)} unfinished samples will be regenerated. {outlook}")
        if self._starts_immediately:
            self._replace()

    @property
    def _no_replacement_reason(self) -> str:
        """The reason why no replacement is started; empty if one is."""
        if self._repeated:
            return "its replacement failed with the same error"
        if self.restarts == self._max_restarts:
            return f"{self.restarts} restarts reached cluster.max_restarts={self._max_restarts}"
        return ""

    def _replace(self) -> asyncio.Task:
        self._restart = asyncio.create_task(self._replacement(), name=f"replace {self.name}")
        self._restart.add_done_callback(lambda task: task.cancelled() or task.exception())  # wait_ready raises it
        return self._restart

    async def _replacement(self) -> None:
        while True:
            if why := self._no_replacement_reason:
                raise EngineError(f"{self._lost}\n{self.name} is not replaced: {why}.")
            self.restarts += 1
            try:
                with self._recorder.span("restart", cause=str(self._lost)) as span:
                    span.where = self.name
                    self.actor, self._calls = await from_head(self._create), 0
                    await self._start_engine()
                return self._say(f"{self.name}: replacement engine is up")
            except WorkerLost as error:
                ray.kill(self.actor)
                why = f"{error}\nIt was started to replace a lost engine: {self._lost}"
                if not is_death(error):
                    raise EngineError(why) from error
                self._lost = EngineLost(why)

    async def _watch(self, actor: ray.actor.ActorHandle) -> None:
        """Poll the engine; declare it lost if it is gone, does not answer or makes no progress."""
        limit = f"for {self.heartbeat_s:g} s (cluster.heartbeat_s)"
        while True:
            await asyncio.sleep(self.heartbeat_s / 4)
            pulse = asyncio.wrap_future(actor.pulse.remote().future())
            await asyncio.wait([pulse], timeout=self.heartbeat_s)
            last = f"last known activity: {self._last_pulse.last}"
            if not pulse.done():
                pulse.cancel()
                return self._lose(actor, f"{self.name}: no answer {limit}; {last}")
            if error := pulse.exception():
                return self._lose(actor, str(explain(error, self.name, "answer a health check", self.timeout_s)))
            self._last_pulse = pulse.result()
            if self._last_pulse.stalled_s > self.heartbeat_s:
                why = f"the engine process made no progress {limit} with {len(self._pending)} unfinished samples"
                return self._lose(actor, f"{self.name}: {why}; last activity: {self._last_pulse.last}")
