"""Calls of Ray actors that never wait without a bound and fail with one readable message.

Role: every engine's driver side awaits its worker through `call`. A user's exception keeps its type's name, message and
the last lines of its own traceback; a dead process, a time-out and a worker that can't be placed are told apart. A wait
that is long shows where all processes stand (`observe.watchdog`).
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from rlfuse.engines.protocols import EngineError
from rlfuse.observe import watchdog


async def call(reference: ray.ObjectRef, worker: str, action: str, timeout: float) -> Any:
    """The result of a remote call; `worker` and `action` name it in errors ("trainer/1", "update the actor")."""
    try:
        with watchdog.waiting(worker, action, timeout):
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout)
    except Exception as error:
        raise explain(error, worker, action, timeout) from error


def explain(error: BaseException, worker: str, action: str, timeout: float) -> BaseException:
    """The error to raise for a failed call: an `EngineError` that names worker, action, cause and remedy."""
    if isinstance(error, EngineError | asyncio.CancelledError):
        return error
    if isinstance(error, RayTaskError):
        cause = error.cause or error
        if isinstance(cause, EngineError):  # says all already
            return EngineError(str(cause))
        tail = "".join(traceback.format_exception(cause)[-6:]) if cause is not error else str(error)
        return EngineError(
            f"{worker} failed to {action}: {type(cause).__name__}: {_first_line(cause)}\n{tail.rstrip()}"
        )
    if isinstance(error, ActorDiedError | ActorUnavailableError):
        return EngineError(
            f"{worker} died while it was asked to {action} ({_reason(error)}). "
            "Out of memory is the usual cause: lower actor.ppo_max_token_len_per_gpu, rollout.max_num_seqs or the KV "
            "cache; the run resumes from its last checkpoint with resume_mode=auto."
        )
    if isinstance(error, TimeoutError | GetTimeoutError):
        return EngineError(
            f"{worker} did not {action} within {timeout:g} s. If that is a normal duration for this model, raise "
            f"cluster.timeout_s.{watchdog.evidence(worker)}"
        )
    return EngineError(f"{worker} failed to {action}: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0]


def _reason(error: BaseException) -> str:
    """Ray's own words on why an actor is gone, without its page of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "OOM" in line]
    return (telling or lines or ["no reason given"])[0][:300]
