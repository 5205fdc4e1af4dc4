"""Call Ray actors with a time limit, and turn failures into one readable message.

User exceptions, dead processes, time-outs and workers without placement are distinguished. A failure that a new process
may avoid is a `WorkerLost`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlfuse.cluster import host_memory, process_logs, scratch, tracebacks, watchdog
from rlfuse.errors import EngineError, EngineLost, FunctionError, NodeLost, WorkerLost

GRACE_S = 5.0
"""Time for the death of a worker to be noticed after its waiting peers have failed."""
MEMORY = "Lower actor.ppo_max_token_len_per_gpu, rollout.max_num_seqs or the KV cache."
DEATHS = RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError
"""Ray errors of a dead process: it died, its node was lost, or Ray killed it because the node ran out of memory."""
PEER_GONE = re.compile(r"connection (closed|reset) by peer|timed out waiting", re.I)
"""torch's error if a peer in a collective is gone."""
COLLECTIVE = re.compile(r"collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+).*?Timeout\(ms\)=(\d+)")
"""Output of torch's NCCL watchdog before it ends the process."""
CRASHED = re.compile(r"(NCCL error|CUDA error|CUDA driver error|what\(\):|Fatal Python error|SIG[A-Z]+ received).*")
"""Last output of a crashed process; the first match is the most informative."""
NO_PAGES = "mmap error: 12"
"""Output of Ray's native code if it cannot allocate memory."""
UNEXPECTED_END = "connection error code 2. End of file"
"""Ray's error for a process that ended without a message."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def on_node(kind: type, node: str, environment: Mapping[str, str] | None = None) -> Any:
    """Return the Ray actor class of `kind` that starts on this node, with these environment variables.

    It requests no CPU: an actor whose request doesn't fit would wait forever without an error.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    variables = {"runtime_env": {"env_vars": dict(environment)}} if environment else {}
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=there, **variables)


async def call(reference: ray.ObjectRef, worker: str, action: str, timeout: float) -> Any:
    """Return the result of a remote call; `worker` and `action` name it in errors ("trainer/1", "update the actor")."""
    try:
        with watchdog.waiting(worker, action, timeout):
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout)
    except Exception as error:
        raise explain(error, worker, action, timeout) from error


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return all results, or raise the first failure at once, preferring a death over failures of its peers."""
    calls = [asyncio.ensure_future(each) for each in calls]
    try:
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if pending and not any(is_death(each.exception()) for each in done):
            await asyncio.wait(pending, timeout=GRACE_S)
        errors = [error for each in calls if each.done() and (error := each.exception())]
        if errors:
            raise min(errors, key=lambda error: not is_death(error))
        return [each.result() for each in calls]
    finally:
        for each in calls:
            each.cancel()


def is_death(error: BaseException | None) -> bool:
    """Return whether a process has died (and is not only late or out of memory)."""
    died = isinstance(getattr(error, "__cause__", None), DEATHS)
    return isinstance(error, WorkerLost) and (died or isinstance(error, EngineLost | NodeLost))


def explain(error: BaseException, worker: str, action: str, timeout: float) -> BaseException:
    """Return the error to raise for a failed call: an `EngineError` with worker, action, cause and remedy.

    A `FunctionError` remains one, with the frames of the custom function only.
    """
    if isinstance(error, RayTaskError):  # first: Ray raises a worker's error as one of both types, with its own text
        process_logs.append(worker, COLOUR.sub("", str(error)))
        cause = error.cause or error
        if isinstance(cause, FunctionError):
            return FunctionError(f"{cause}\nIt was called by {worker} to {action}.")
        if isinstance(cause, EngineError):  # its message is complete
            return type(cause)(_with_logs("\n".join([str(cause), *_notes(cause)]), worker))
        text = f"{worker} failed to {action}: {_raised(error)}"
        if isinstance(cause, MemoryError) or host_memory.NO_MEMORY.search(str(cause)):
            return WorkerLost(_with_logs(f"{text}\nIt is out of memory. {MEMORY}", worker))
        return (WorkerLost if PEER_GONE.search(str(cause)) else EngineError)(_with_logs(text, worker))
    if isinstance(error, EngineError | asyncio.CancelledError):
        return error
    if isinstance(error, ActorDiedError) and "creation task" in str(error):
        process_logs.append(worker, COLOUR.sub("", str(error)))
        return EngineError(_with_logs(f"{worker} could not be created: {_raised(error)}", worker))
    if isinstance(error, DEATHS):
        return WorkerLost(f"{worker} died during the call to {action}: {cause_of_death(error, worker)}")
    if isinstance(error, TimeoutError | GetTimeoutError):
        text = f"{worker} did not {action} within {timeout:g} s. If this duration is normal for the model, raise "
        return WorkerLost(_with_logs(f"{text}cluster.timeout_s.{watchdog.evidence(worker)}", worker))
    return EngineError(_with_logs(f"{worker} failed to {action}: {type(error).__name__}: {_first_line(error)}", worker))


def cause_of_death(error: BaseException, worker: str) -> str:
    """Describe why a worker died, from its last output, Ray's error and its last recorded event."""
    pid = found[1] if (found := re.search(r"pid: (\d+)", str(error))) else ""
    words = process_logs.last_output(worker, pid)
    if words is not None:
        return _with_logs(_describe_death(error, worker, pid, words), worker)
    words, path = _words_for_ray(str(error), pid)
    where = f"\nlogs: Ray's of it, {path}" if path else ""
    return f"{_describe_death(error, worker, pid, words)}{where}"


def _describe_death(error: BaseException, worker: str, pid: str, words: str) -> str:
    cause, lacked = _cause(error, words), host_memory.oom_kills()
    own = " It is out of memory." if host_memory.NO_MEMORY.search(cause) or NO_PAGES in words else ""
    remedy = f" {MEMORY}" if own or lacked or isinstance(error, OutOfMemoryError) else ""
    return f"{cause}{own}{lacked}{remedy}{watchdog.last_event(worker, pid)}{host_memory.free_memory()}"


def _cause(error: BaseException, words: str) -> str:
    if found := COLLECTIVE.search(words):
        number, kind, milliseconds = found.groups()
        return (
            f"it ended itself after waiting {int(milliseconds) / 1000:g} s (a fraction of cluster.timeout_s) in "
            f"collective {number} ({kind}) for a missing rank. Check the stacks of the other ranks, and "
            "stacks/nccl_rank_* of the run folder with `python -m torch.distributed.flight_recorder.fr_trace`. "
            "If a rank may take that long, raise cluster.timeout_s."
        )
    if found := CRASHED.search(words):
        return f"it crashed: {found[0][:300].strip()}."
    if UNEXPECTED_END in str(error):
        only = "Only that, or os._exit, ends a process without a message."
        return f"killed by signal 9 (SIGKILL); the sender is unknown. {only}"
    if "SIGTERM" in str(error):
        return "killed by signal 15 (SIGTERM); the sender is unknown."
    return f"{_reason(error)}."


def _words_for_ray(death: str, pid: str) -> tuple[str, str]:
    """Return (output, log path) of a dead process from Ray's logs, which move to `logs` after a failure."""
    if not pid:
        return "", ""
    address = found[1] if (found := re.search(r"\bip: (\S+)", death)) else None
    file = f"worker-*-{pid}.err"
    node = ray._private.worker._global_node  # there is no public function for the log folder
    if node is not None and address is not None and address == node.node_ip_address:
        for path in Path(node.get_logs_dir_path()).glob(file):
            kept = process_logs.folder() if path.is_relative_to(scratch.of_this_process()) else None
            where = kept / path.parents[1].name / path.name if kept else path
            return path.read_text(errors="replace")[-process_logs.LAST :], str(where)
    return "", f"/tmp/ray/session_latest/logs/{file}" + (f" of {address}" if address else "")


def _with_logs(text: str, worker: str) -> str:
    return "\n".join(filter(None, [text.rstrip(), process_logs.log_hint(worker)]))


def _raised(error: BaseException) -> str:
    traced = [*tracebacks.found_in(COLOUR.sub("", str(error)))]
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayTaskError | ActorDiedError):
        headline = traced[-1].error if traced else _first_line(cause)
    else:
        headline = f"{type(cause).__name__}: {_first_line(cause)}"
    return "\n".join([headline, *_notes(cause), *(traced[-1].own if traced else [])])


def _notes(cause: BaseException) -> list[str]:
    """Return the notes that a worker added to its exception, e.g. the pass that failed."""
    return getattr(cause, "__notes__", [])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0]


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "OOM" in line]
    reason = (telling or lines or ["no reason given"])[0].partition(" Some common causes")[0]
    raised = [each.error.partition("\n")[0] for each in tracebacks.found_in(str(error))]
    return " ".join([reason.partition(" Traceback (most recent")[0][:300], *raised[-1:]]).rstrip(".")
