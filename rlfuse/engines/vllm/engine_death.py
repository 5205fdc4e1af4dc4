"""Find out why vLLM's engine process ended or failed to start, since vLLM only reports "see root cause above".

`RolloutWorker` creates an `ErrorOutput` before it starts the engine. Waits at most EXIT_S for an exit status.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from rlfuse.cluster import host_memory, process_logs, tracebacks
from rlfuse.cluster.watchdog import TRACEBACK
from rlfuse.errors import EngineError, EngineFailed, EngineLost

EXIT_S = 2.0
PREFIX = re.compile(r".*?\[\w+\.py:\d+\] ?|\(\S+ pid=\d+\) ?")
"""Prefixes of vLLM's log lines and of its processes' output."""
REFERENCE = re.compile(r"root cause|stack trace above|see above|EngineDeadError|died unexpectedly", re.I)
"""Text of errors that only refer to another error."""
WORKER = re.compile(r"Worker proc \S+ died unexpectedly \(exit code: (-\d+)\)")
"""vLLM's message on a worker process that a signal killed; the engine then exits with an error."""
CRASH = re.compile(
    r"^.*(?:Fatal Python error|Segmentation fault|terminate called|what\(\):|No space left|SIG[A-Z]+ received).*$", re.M
)
CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals of crashes in native code."""
REMEDY = (
    "Lower rollout.max_num_seqs or the KV cache (rollout.kv_cache_memory_mb, on GPUs rollout.gpu_memory_utilization)."
)


class ErrorOutput:
    """Output of this process and its children on stderr from now on, if that is a file (as under Ray)."""

    def __init__(self, stderr: str = "/proc/self/fd/2") -> None:
        self._file = Path(os.path.realpath(stderr))
        self._start = self._file.stat().st_size if self._file.is_file() else 0

    def text(self) -> str:
        """Return the end of the output, without vLLM's prefixes."""
        if not self._file.is_file():
            return ""
        with self._file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = self._start if self._start <= size else 0  # the log was truncated
            file.seek(max(start, size - process_logs.LAST))
            return _unprefixed(file.read().decode(errors="replace"))

    def raised(self) -> str:
        """Return the first exception at the end of the output, with its stack frames; may be empty."""
        text = self.text()
        found = [each for each in tracebacks.found_in(text) if not REFERENCE.search(each.error)]
        if found and os.environ.get(TRACEBACK) == "1":
            return text[text.index(found[-1].frames[0].partition("\n")[0]) :].strip()
        if found:
            return found[-1].short()
        named = [line.strip() for line in text.splitlines() if tracebacks.RAISED.match(line.strip())]
        return "\n".join([line for line in dict.fromkeys(named) if not REFERENCE.search(line)][-tracebacks.LINES :])

    def crash(self) -> str:
        """Return the lines that report a crash of native code; may be empty."""
        lines = [line.strip() for line in CRASH.findall(self.text())]
        return "\n".join([*dict.fromkeys(lines)][-tracebacks.LINES :])


def _unprefixed(text: str) -> str:
    """Remove vLLM's prefixes; a blank line separates messages."""
    lines, before = list[str](), ""
    for line in text.splitlines():
        prefix = found[0] if (found := PREFIX.match(line)) else ""
        if prefix != before:
            lines.append("")
        lines.append(line[len(prefix) :])
        before = prefix
    return "\n".join(lines)


def processes(engine: Any) -> list[Any]:
    """Return the child processes of vLLM's AsyncLLM."""
    return list(getattr(engine.engine_core.resources.engine_manager, "processes", []))


def death_error(name: str, errors: ErrorOutput, children: list[Any]) -> EngineLost:
    """Return the error for an engine whose process is gone."""
    raised, crash = errors.raised(), errors.crash()
    if worker := WORKER.search(errors.text()):
        raised, status = "", int(worker[1])
    else:
        status = _exit_status(
            children, 0.0 if raised else EXIT_S
        )  # a process that raised has already printed its exception
    if raised and status == -signal.SIGTERM:  # vLLM terminates the remaining processes
        status = None
    if (status is not None and status < 0 and not crash and -status not in CRASH_SIGNALS) or status == -signal.SIGKILL:
        return EngineLost(f"{name}: vLLM's engine process was {describe_kill(-status)}{host_memory.free_memory()}")
    if status is not None and status < 0:
        details = f"\n{crash}" if crash else host_memory.free_memory()
        return EngineFailed(f"{name}: vLLM's engine process crashed with {_signal(-status)}.{_remedy(crash)}{details}")
    if raised:
        return EngineFailed(f"{name}: vLLM's engine process failed with an exception.{_remedy(raised)}\n{raised}")
    if crash:
        return EngineFailed(f"{name}: vLLM's engine process crashed.{_remedy(crash)}\n{crash}")
    how = "" if status is None else f" with exit status {status}"
    return EngineLost(f"{name}: vLLM's engine process exited{how} without an error message.{host_memory.free_memory()}")


def start_error(name: str, model: str, errors: ErrorOutput, error: Exception) -> EngineError:
    """Return the error for an engine that could not be started."""
    text = f"{name} could not start vLLM for {model}."
    if found := re.search(r"proc\(s\): {.*?: -(\d+)", str(error)):
        crash = errors.crash()
        ended = f"\n{crash}" if crash and int(found[1]) != signal.SIGKILL else ""
        return EngineLost(f"{text} Its process was {describe_kill(int(found[1]))}{host_memory.free_memory()}{ended}")
    raised = errors.raised() or errors.crash() or str(error)
    return EngineError(f"{text}{_remedy(raised)}\n{raised}")


def describe_kill(number: int) -> str:
    """Return a message on the signal that killed a process, and its cause if known."""
    return f"killed by {_signal(number)}; the sender is unknown.{host_memory.oom_kills()}"


def _signal(number: int) -> str:
    return f"signal {number} ({ {each.value: each.name for each in signal.Signals}.get(number, 'unknown') })"


def _remedy(error: str) -> str:
    if host_memory.NO_MEMORY.search(error):
        return f" It is out of memory. {REMEDY}"
    return host_memory.shared_full()


def _exit_status(children: list[Any], timeout_s: float) -> int | None:
    """Return the exit status of the process that failed, negative for a signal; None while all processes run."""
    until = time.monotonic() + timeout_s
    while True:
        ended = [each.exitcode for each in children if each.exitcode is not None]
        if ended or time.monotonic() > until:
            return next((status for status in ended if status), next(iter(ended), None))
        time.sleep(0.02)
