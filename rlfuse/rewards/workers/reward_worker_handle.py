"""Send calls to one reward process and replace it when it is lost. Used by `RewardPool` only.

One call runs at a time. A lost process may have been killed from outside, so a call fails only if the next process
dies in it too. Every call taken from the queue gets outcomes or an EngineError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from rlfuse import clock
from rlfuse.cluster import remote, watchdog
from rlfuse.cluster.nodes import from_head
from rlfuse.config.custom_errors import headline, text
from rlfuse.config.secrets import hidden_text
from rlfuse.errors import EngineError, WorkerLost
from rlfuse.events import Recorder, Span
from rlfuse.rewards.api.items import Item, Outcome
from rlfuse.rewards.api.shapes import timeout_failure
from rlfuse.samples import RewardFailure


@dataclass(slots=True)
class Call:
    """Call of one function for some items."""

    name: str
    items: list[Item]
    positions: list[int]
    limit_s: float
    timeout_s: float
    is_batched: bool
    seconds: float = field(default=0.0, init=False)
    returns_awaitable: bool = field(default=False, init=False)
    is_repeat: bool = False
    answer: asyncio.Future[list[Outcome]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), init=False
    )

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def singles(self) -> list[Call]:
        return [replace(self, items=[i], positions=[p]) for i, p in zip(self.items, self.positions, strict=True)]


class Queue(Protocol):
    """Queue from which a handle takes calls."""

    async def get(self) -> Call: ...


class ProcessLost(Exception):
    """The process exceeded its time or memory limit, or died. `outcomes`: result if the call is not repeated."""

    def __init__(
        self, outcomes: list[Outcome], cause: str, is_timeout: bool = False, is_memory_exhausted: bool = False
    ):
        super().__init__(cause)
        self.outcomes, self.cause = outcomes, cause
        self.is_timeout, self.is_memory_exhausted = is_timeout, is_memory_exhausted


class RewardWorkerHandle:
    """Handle that serves the calls of a queue with one process at a time."""

    def __init__(self, where: str, queue: Queue, create: Callable[[], Any], start_timeout_s: float):
        self.where = where
        self.recorder = Recorder(where)
        self._queue = queue
        self._create = create
        self._start_timeout_s = start_timeout_s
        self._actor: Any = None
        self._restart: asyncio.Task | None = None
        self._is_fresh = True

    async def start(self) -> None:
        self._actor = await from_head(self._create)
        problem = await remote.call(self._actor.start.remote(), self.where, "start", self._start_timeout_s)
        if problem:
            raise EngineError(f"{self.where} could not start: {problem}")
        self._is_fresh = True

    async def serve(self) -> None:
        while True:
            call = await self._queue.get()
            if call.answer.done():
                continue
            try:
                outcomes = await self._outcomes(call)
            except asyncio.CancelledError:
                call.fail(EngineError(f"{self.where} was closed while it scored {_ids(call)}"))
                raise
            except Exception as error:
                call.fail(remote.explain(error, self.where, f"score {_ids(call)}", call.timeout_s))
                continue
            if not call.answer.done():
                call.answer.set_result(outcomes)

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return spans since the last call. `collect`: run garbage collection first, unless a call is running."""
        if collect and not self.recorder.open and self._actor is not None:
            with suppress(WorkerLost):  # the next call replaces the dead process
                collected = self._actor.collect.remote()
                for span in await remote.call(collected, self.where, "collect garbage", self._start_timeout_s):
                    self.recorder.add(span)
        return self.recorder.drain()

    async def close(self) -> None:
        if self._restart:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._actor is not None:
            ray.kill(self._actor)

    async def _outcomes(self, call: Call) -> list[Outcome]:
        several = len(call.items) > 1
        try:
            outcomes = await self._attempt(call)
            all_failed = all(isinstance(outcome, RewardFailure) for outcome in outcomes)
            is_timeout = (
                call.seconds >= call.timeout_s
            )  # an async function that bounded itself: repeating could take as long
            if is_timeout or not (several and call.is_batched and all_failed):
                return outcomes
        except ProcessLost as lost:
            was_fresh = self._is_fresh
            # The next call waits for the new process; this answer does not.
            self._restart = asyncio.create_task(self._replacement(lost))
            if lost.is_timeout and (call.is_batched or not several):
                return lost.outcomes
            if not was_fresh and (call.is_batched or not several):
                call.is_repeat = call.is_repeat or not lost.is_memory_exhausted
                return await self._outcomes(call)
            if not several and (lost.is_memory_exhausted or call.is_repeat):
                return lost.outcomes
            call.is_repeat, outcomes = not (lost.is_timeout or lost.is_memory_exhausted), lost.outcomes
        return await self._one_by_one(call, outcomes)

    async def _one_by_one(self, call: Call, outcomes: list[Outcome]) -> list[Outcome]:
        found = []
        for single, outcome in zip(call.singles(), outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                if call.answer.done():  # cancelled by `score`
                    break
                [outcome] = await self._outcomes(single)
            found.append(outcome)
        return found

    async def _attempt(self, call: Call) -> list[Outcome]:
        if self._restart:  # a failed restart raises for every call
            await self._restart
        with self.recorder.span(
            "reward",
            step=call.items[0].step,
            samples=tuple(item.id for item in call.items),
            tokens=sum(item.tokens for item in call.items),
            cause="finished samples",
            attributes={"function": call.name},
        ) as span:
            reference = self._actor.score.remote(call.name, call.items)
            try:
                answer = asyncio.wrap_future(reference.future())
                outcomes, call.returns_awaitable, is_memory_exhausted = await asyncio.wait_for(answer, call.limit_s)
            except TimeoutError:
                if watchdog.is_stopped(self.where):
                    failure = RewardFailure(call.name, f"the process of {call.name} was suspended by a signal")
                    raise self._lost(call, failure) from None
                stack = await watchdog.stack_of(self.where)
                failure = replace(timeout_failure(call.name, call.timeout_s), traceback=stack)
                raise self._lost(call, failure, is_timeout=True) from None
            except RayError as error:  # after a RayTaskError the process is alive; `_lost` kills it
                raise self._lost(call, _death(self.where, call.name, error)) from error
            call.seconds = clock.now() - span.start
        if is_memory_exhausted:
            ray.kill(self._actor)
            raise ProcessLost(
                outcomes, f"{call.name} ran out of memory: earlier calls did not free theirs", is_memory_exhausted=True
            )
        self._is_fresh = False
        return outcomes

    def _lost(self, call: Call, failure: RewardFailure, is_timeout: bool = False) -> ProcessLost:
        ray.kill(self._actor)
        return ProcessLost([failure] * len(call.items), failure.message, is_timeout=is_timeout)

    async def _replacement(self, lost: ProcessLost) -> None:
        with self.recorder.span("restart", cause=lost.cause):
            await self.start()


def pool_closed_error() -> EngineError:
    """Return the error for calls that are never served."""
    return EngineError("the reward pool was closed while samples were waiting")


def _death(where: str, name: str, error: Exception) -> RewardFailure:
    if isinstance(error, RayTaskError):
        why, more = f"the function left the process unusable, {headline(error.cause or error)}", str(error)
    else:
        why, _, more = remote.cause_of_death(error, where).partition("\n")
    why, more = hidden_text(why), hidden_text(text(more))
    return RewardFailure(name, f"the process of {name} died while scoring this sample: {why}", more)


def _ids(call: Call) -> str:
    ids = ", ".join(item.id for item in call.items[:4])
    return f"{call.name} for {ids}" + (f" and {len(call.items) - 4} more" if len(call.items) > 4 else "")
