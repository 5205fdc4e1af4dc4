"""Calls of Ray actors that never wait without a bound and fail with one readable message.

Role: every engine's driver side awaits its worker through `call`, that of several workers at once through `all_of`. A
user's exception keeps its type's name, message and the last lines of its own traceback; a dead process (by what it
wrote last, where its output can be read here), a time-out and a worker that can't be placed are told apart. What may go
well another time, in another process, is a `WorkerLost`. A wait that is long shows where all processes stand
(`observe.watchdog`).
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from rlfuse.engines.protocols import EngineError, WorkerLost
from rlfuse.observe import watchdog

LAST = 1 << 16
"""Bytes of a dead process's output."""
GRACE_S = 5.0
"""Time for the death of a worker to show, once peers that waited for it have failed."""
MEMORY = (
    "Out of memory is the usual cause: lower actor.ppo_max_token_len_per_gpu, rollout.max_num_seqs or the KV cache."
)
GONE = re.compile(r"can't allocate memory|out of memory|connection (closed|reset) by peer|timed out waiting", re.I)
"""What torch says where memory or a peer in a collective is gone."""
COLLECTIVE = re.compile(r"collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+).*?Timeout\(ms\)=(\d+)")
"""Of torch's watchdog of NCCL, before it ends the process."""
CRASHED = re.compile(r"(NCCL error|CUDA error|CUDA driver error|what\(\):|Fatal Python error|SIG[A-Z]+ received).*")
"""What a process wrote before it was ended by itself; the first of these says the most."""
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
        return WorkerLost(f"{worker} died while it was asked to {action} ({_reason(error)}). {why_it_ended(error)}")
    if isinstance(error, TimeoutError | GetTimeoutError):
        return WorkerLost(
            f"{worker} did not {action} within {timeout:g} s. If that is a normal duration for this model, raise "
            f"cluster.timeout_s.{watchdog.evidence(worker)}"
        )
    return EngineError(f"{worker} failed to {action}: {type(error).__name__}: {_first_line(error)}")


def why_it_ended(error: BaseException) -> str:
    """What can be said of a death: by the process's own last words, else what is usual."""
    words, where = _last_words(str(error))
    if found := COLLECTIVE.search(words):
        number, kind, milliseconds = found.groups()
        return (
            f"It ended itself when it had waited {int(milliseconds) / 1000:g} s (a share of cluster.timeout_s) in "
            f"collective {number} ({kind}) for a rank that did not come: look at the others' stacks, and in "
            "stacks/nccl_rank_* of the run folder, which `python -m torch.distributed.flight_recorder.fr_trace` reads. "
            "If a rank may take that long, raise cluster.timeout_s."
        )
    if found := CRASHED.search(words):
        memory = f" {MEMORY}" if GONE.search(found[0]) else ""
        return f"It ended itself: {found[0][:300].strip()}; the rest is in {where}.{memory}"
    return f"{MEMORY} It wrote to {where}." if where else MEMORY


def _last_words(death: str) -> tuple[str, str]:
    """What a dead process wrote to its error output, as far as it can be read on this node, and where that is."""
    pid, address = (re.search(rf"\b{name}: (\S+)", death) for name in ("pid", "ip"))
    if pid is None:
        return "", ""
    file = f"worker-*-{pid[1]}.err"
    node = ray._private.worker._global_node  # no public function tells where Ray writes
    if node is not None and address is not None and address[1] == node.node_ip_address:
        for path in Path(node.get_logs_dir_path()).glob(file):
            return path.read_text(errors="replace")[-LAST:], str(path)
    return "", f"/tmp/ray/session_latest/logs/{file}" + (f" of {address[1]}" if address else "")


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
