"""The driver's handle of one rollout engine, which outlives the engine: a lost one is replaced.

Implements the controller's `RolloutEngine` and the weight sync's `WeightReceiver`; `timeout_s` bounds every remote
call.

    generate, evict, ... --> actor          _watch --pulse--> actor
          | EngineLost <-- _lose <------------- | silent, still
          +--> _restart: a new actor starts --> wait_ready <-- WeightPush: begin_update, receive, finish_update

Invariants: an engine is lost if its process died, or for `heartbeat_s` did not answer or stood still with work to do;
its actor is killed, and every call raises `EngineLost`. One that failed by an error of its own (`EngineFailed`) is
replaced, unless its successor fails alike. A replacement generates only after `finish_update`.
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
from rlfuse.config.schema import ModelConfig, RolloutConfig
from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
from rlfuse.engines.rollout.liveness import Pulse
from rlfuse.errors import EngineError, EngineFailed, EngineLost, WorkerLost
from rlfuse.events import Recorder, Span
from rlfuse.protocols import PARTS, Load, Part, Sampling
from rlfuse.samples import Partial, Response, Sample


class RolloutHandle:
    """The driver's side of one engine. `create` makes its actor; `max_restarts` bounds replacements; `beside`: the slot
    has memory for an engine to start while the rank works, else it starts with the next push; `recorder` and `say`
    report losses."""

    def __init__(
        self,
        create: Callable[[], ray.actor.ActorHandle],
        name: str,
        timeout_s: float,
        heartbeat_s: float = 60.0,
        max_restarts: int = 0,
        beside: bool = True,
        recorder: Recorder | None = None,
        say: Callable[[str], None] = lambda _: None,
    ):
        self.name, self.timeout_s, self.heartbeat_s = name, timeout_s, heartbeat_s
        self.actor = create()
        self.restarts = 0
        self._create, self._max_restarts, self._beside = create, max_restarts, beside
        self._recorder, self._say = recorder or Recorder("driver"), say
        self._arguments: tuple[Any, ...] = ()
        self._calls = 0
        self._open: set[str] = set()
        """Samples handed over and not answered."""
        self._lost: EngineLost | None = None
        self._failures: set[str] = set()
        """Errors by which engines ended here."""
        self._repeated = False
        """Whether the last engine ended by one of these."""
        self._gone: ray.actor.ActorHandle | None = None
        """The last actor that was given up."""
        self._asleep: set[Part] | None = None
        """Sleeping parts; None: unknown."""
        self._served: ray.actor.ActorHandle | None = None
        """The actor with which the current push began."""
        self._restart: asyncio.Task | None = None
        self._watching: asyncio.Task | None = None
        self._heard: Pulse

    async def start(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        device: str,
        tail_speculation: int = 0,
        core: int | None = None,
    ) -> dict:
        """Start the engine; return {start_s, kv_tokens, kv_bytes_per_token}. `max_model_len`: longest prompt plus
        longest response. `tail_speculation`: draft while at most so many samples are left. `core`: of a CPU host, for
        all threads of the engine."""
        self._arguments = (model, rollout, max_model_len, device, tail_speculation, core)
        return await self._begin()

    async def _begin(self) -> dict:
        action = "start its engine"
        facts = await call(self.actor.start.remote(*self._arguments), self.name, action, self.timeout_s)
        self._asleep = set()
        self._heard = Pulse(0.0, "its start")
        self._watching = asyncio.create_task(self._watch(self.actor), name=f"watch {self.name}")
        return facts

    async def stop(self) -> None:
        """End the engine's processes; the actor stays."""
        for task in (self._watching, self._restart):
            if task is not None:
                task.cancel()
        if self._lost is None:
            await self._call("stop", "stop its engine")

    # Generation ------------------------------------------------------------------------------------------------------

    async def generate(
        self, samples: Sequence[Sample], sampling: Sampling, partials: Mapping[str, Partial] | None = None
    ) -> AsyncIterator[tuple[str, Response | Partial]]:
        """Yield (sample id, response) in finishing order; leaving early evicts the rest. `partials`: sample id -> what
        it has already, which its response includes. An evicted sample yields a `Partial`. EngineLost: generate the
        others elsewhere."""
        self._check()
        requests = [Request.of(sample, (partials or {}).get(sample.id, EMPTY_PARTIAL)) for sample in samples]
        action = f"generate {len(requests)} samples"
        self._calls += 1
        actor, stream = self.actor, self.actor.generate.options(num_returns="streaming").remote(requests, sampling)
        open_ids = {request.id for request in requests}
        self._open |= open_ids
        try:
            while open_ids:
                for sample_id, result in await self._next(actor, stream, action):
                    open_ids.discard(sample_id)
                    self._open.discard(sample_id)
                    yield sample_id, result
        finally:
            if open_ids and self._lost is None and actor is self.actor:
                self._open -= open_ids
                actor.evict.remote(sorted(open_ids), "tokens", self._calls)

    async def _next(self, actor: ray.actor.ActorHandle, stream: Any, action: str) -> list:
        try:
            with watchdog.waiting(self.name, action, self.timeout_s):
                reference = await asyncio.wait_for(anext(stream), self.timeout_s)
        except StopAsyncIteration:
            raise EngineError(f"{self.name} ended its stream before it finished to {action}") from None
        except Exception as error:
            raise self._judged(explain(error, self.name, action, self.timeout_s), actor) from error
        results = await self._answer(actor, reference, action)
        if actor is not self.actor:
            raise EngineLost(f"{self.name} was replaced while it was asked to {action}")
        self._check()
        return results

    async def evict(self, sample_ids: Sequence[str], carry: str = "tokens") -> None:
        self._check()
        await self._call("evict", f"evict {len(sample_ids)} samples", list(sample_ids), carry, self._calls)

    async def load(self) -> Load:
        self._check()
        return await self._call("load", "report its load")

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return spans since the last call, none of a lost engine; `collect`: collect garbage first."""
        with suppress(EngineLost):
            self._check()
            return await self._call("drain", "hand over its events", collect)
        return []

    async def sleep(self, discard: bool = False) -> None:
        """Free the device if it is not free; `EngineError` while samples are active. `discard`: the next push
        overwrites the weights before anything is generated."""
        await self._turn({*PARTS}, "sleep", "give its device up", discard)

    async def wake(self, part: Part | None = None) -> None:
        """Take the device back, or only for a part."""
        asleep = ({*PARTS} if self._asleep is None else self._asleep) - ({part} if part else {*PARTS})
        which = f" for its {part}" if part else ""
        await self._turn(asleep, "wake", f"take its device back{which}", part)

    async def _turn(self, asleep: set[Part], method: str, action: str, *arguments: Any) -> None:
        """Have these parts sleep."""
        if self._has_engine and self._asleep != asleep:
            self._asleep = None
            with suppress(EngineLost):
                await self._call(method, action, *arguments)
                self._asleep = asleep

    # Weights ---------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        self._served = self.actor if self._has_engine else None
        await self._serve("begin_update", "pause for new weights")

    async def receive(self, info: dict[str, Any]) -> None:
        await self._serve("receive", "load a bucket of weights", info)

    async def finish_update(self, version: int) -> None:
        """Resume with the new weights; a replacement engine generates from now on."""
        await self._serve("finish_update", f"take weights as version {version}", version)
        self._lost = self._restart = None

    async def version(self) -> int:
        self._check()
        return await self._call("version", "report its weights' version")

    async def _serve(self, method: str, action: str, *arguments: Any) -> None:
        """Make a call of a push, unless the engine was replaced since the push began."""
        self._check_served(action)
        await self._call(method, action, *arguments)
        self._check_served(action)

    def _check_served(self, action: str) -> None:
        if self._served is not self.actor or self._served is self._gone:
            raise EngineLost(f"{self.name} was lost when it was asked to {action}")

    async def _call(self, method: str, action: str, *arguments: Any) -> Any:
        return await self._answer(self.actor, getattr(self.actor, method).remote(*arguments), action)

    async def _answer(self, actor: ray.actor.ActorHandle, reference: ray.ObjectRef, action: str) -> Any:
        try:
            return await call(reference, self.name, action, self.timeout_s)
        except WorkerLost as error:
            raise self._judged(error, actor) from error

    # Loss and replacement --------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether the engine has to be replaced, or its replacement has no weights yet."""
        return self._lost is not None

    @property
    def _has_engine(self) -> bool:
        """Whether the first engine is alive, or its replacement has started."""
        restart = self._restart
        return self._lost is None or (restart is not None and restart.done() and not restart.exception())

    async def wait_ready(self) -> None:
        """Return when there is an engine to push weights to. EngineError if none can be started, or too many were
        lost."""
        if self._lost is not None:
            await (self._restart or self._replace())

    def _check(self) -> None:
        if self._lost is not None:
            raise EngineLost(str(self._lost))

    def _judged(self, error: BaseException, actor: ray.actor.ActorHandle) -> BaseException:
        """Return the error to raise for a failed call: `EngineLost` if the engine is gone."""
        if not isinstance(error, WorkerLost):
            return error
        self._lose(actor, str(error), failed=isinstance(error, EngineFailed))
        return EngineLost(str(self._lost or error))

    def _lose(self, actor: ray.actor.ActorHandle, why: str, failed: bool = False) -> None:
        """Give this actor up once; `failed`: by an error of its own."""
        if actor is not self.actor or actor is self._gone:
            return
        self._gone, now, samples = actor, clock.now(), tuple(sorted(self._open))
        self._lost, self._restart, self._open = EngineLost(why), None, set()
        if failed:
            failure = re.sub(r"0x[0-9a-f]+|\d+", "#", why)
            self._repeated = failure in self._failures
            self._failures.add(failure)
        self._recorder.add(Span("lost", self.name, now, now, samples=samples, cause=why))
        ray.kill(actor)
        left = "; it is not replaced any more" if self._no_other else ", another one starts"
        self._say(f"lost: {why}\n{self.name}: its {len(samples)} samples are generated again{left}")
        if self._beside:
            self._replace()

    @property
    def _no_other(self) -> str:
        """Why no replacement is started; empty if one is."""
        if self._repeated:
            return "its successor failed in the same way"
        if self.restarts == self._max_restarts:
            return f"that was done {self.restarts} of at most cluster.max_restarts={self._max_restarts} times"
        return ""

    def _replace(self) -> asyncio.Task:
        self._restart = asyncio.create_task(self._replacement(), name=f"replace {self.name}")
        self._restart.add_done_callback(lambda task: task.cancelled() or task.exception())  # wait_ready raises it
        return self._restart

    async def _replacement(self) -> None:
        while True:
            if why := self._no_other:
                raise EngineError(f"{self._lost}\n{self.name} is not replaced: {why}.")
            self.restarts += 1
            try:
                with self._recorder.span("restart", cause=str(self._lost)) as span:
                    span.where = self.name
                    self.actor, self._calls = await from_head(self._create), 0
                    await self._begin()
                return self._say(f"{self.name}: replacement engine is up")
            except WorkerLost as error:
                ray.kill(self.actor)
                why = f"{error}\nIt was to replace a lost engine: {self._lost}"
                if not is_death(error):
                    raise EngineError(why) from error
                self._lost = EngineLost(why)

    async def _watch(self, actor: ray.actor.ActorHandle) -> None:
        """Detect that the engine is gone or hangs."""
        limit = f"for {self.heartbeat_s:g} s (cluster.heartbeat_s)"
        while True:
            await asyncio.sleep(self.heartbeat_s / 4)
            asked = asyncio.wrap_future(actor.pulse.remote().future())
            await asyncio.wait([asked], timeout=self.heartbeat_s)
            heard = f"the last that was heard of it is {self._heard.last}"
            if not asked.done():
                asked.cancel()
                return self._lose(actor, f"{self.name}: it did not answer {limit}; {heard}")
            if error := asked.exception():
                return self._lose(actor, str(explain(error, self.name, "say whether it is well", self.timeout_s)))
            self._heard = asked.result()
            if self._heard.stalled_s > self.heartbeat_s:
                why = f"its engine process has stood still {limit} with {len(self._open)} samples at hand"
                return self._lose(actor, f"{self.name}: {why}; the last that it did is {self._heard.last}")
