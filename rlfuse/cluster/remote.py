"""Calls of Ray actors that never wait without a bound and fail with one readable message.

Role: every engine's driver side awaits its worker through `call`, that of several workers at once through `all_of`. A
user's exception keeps its type's name, message and the last lines of its own traceback; a dead process, a time-out and
a worker that can't be placed are told apart. What may go well another time, in another process, is a `WorkerLost`. A
wait that is long shows where all processes stand (`observe.watchdog`).
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from rlfuse.engines.protocols import EngineError, WorkerLost
from rlfuse.observe import watchdog

GRACE_S = 5.0
"""Time for the death of a worker to show, once peers that waited for it have failed."""
MEMORY = (
    "Out of memory is the usual cause: lower actor.ppo_max_token_len_per_gpu, rollout.max_num_seqs or the KV cache."
)
GONE = re.compile(r"can't allocate memory|out of memory|connection (closed|reset) by peer|timed out waiting", re.I)
"""What torch says where memory or a peer in a collective is gone."""
RAISED = re.compile(r"[\w.]+(Error|Exception)\b")
"""The last line of a traceback."""


async def call(reference: ray.ObjectRef, worker: str, action: str, timeout: float) -> Any:
    """The result of a remote call; `worker` and `action` name it in errors ("trainer/1", "update the actor")."""
    try:
        with watchdog.waiting(worker, action, timeout):
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout)
    except Exception as error:
        raise explain(error, worker, action, timeout) from error


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results, or the first failure at once: peers of a dead worker would wait for it inside a collective.

    Where the failure is but such a peer's, the death that it comes of.
    """
    calls = [asyncio.ensure_future(each) for each in calls]
    try:
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if pending and not any(_dead(each.exception()) for each in done):
            await asyncio.wait(pending, timeout=GRACE_S)
        errors = [error for each in calls if each.done() and (error := each.exception())]
        if errors:
            raise min(errors, key=lambda error: not _dead(error))
        return [each.result() for each in calls]
    finally:
        for each in calls:
            each.cancel()


def _dead(error: BaseException | None) -> bool:
    return isinstance(getattr(error, "__cause__", None), ActorDiedError)


def explain(error: BaseException, worker: str, action: str, timeout: float) -> BaseException:
    """The error to raise for a failed call: an `EngineError` that names worker, action, cause and remedy."""
    if isinstance(error, RayTaskError):  # first: Ray raises a worker's error as one of both types, with its own text
        cause = error.cause or error
        if isinstance(cause, EngineError):  # says all already
            return type(cause)(str(cause))
        tail = "".join(traceback.format_exception(cause)[-6:]) if cause is not error else str(error)
        text = f"{worker} failed to {action}: {type(cause).__name__}: {_first_line(cause)}"
        if isinstance(cause, MemoryError) or GONE.search(str(cause)):
            return WorkerLost(f"{text}. {MEMORY}\n{tail.rstrip()}")
        return EngineError(f"{text}\n{tail.rstrip()}")
    if isinstance(error, EngineError | asyncio.CancelledError):
        return error
    if isinstance(error, ActorDiedError | ActorUnavailableError):
        return WorkerLost(f"{worker} died while it was asked to {action} ({_reason(error)}). {MEMORY}")
    if isinstance(error, TimeoutError | GetTimeoutError):
        return WorkerLost(
            f"{worker} did not {action} within {timeout:g} s. If that is a normal duration for this model, raise "
            f"cluster.timeout_s.{watchdog.evidence(worker)}"
        )
    return EngineError(f"{worker} failed to {action}: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0]


def _reason(error: BaseException) -> str:
    """Ray's own words on why an actor is gone, without its page of advice and all but the end of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "OOM" in line]
    reason = (telling or lines or ["no reason given"])[0].partition(" Some common causes")[0]
    reason, traced, _ = reason.partition(" Traceback (most recent call last)")
    raised = [line for line in lines if RAISED.match(line)] if traced else []
    return " ".join([reason[:300], *raised[-1:]])
