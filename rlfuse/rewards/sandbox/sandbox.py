"""Run untrusted Python code against tests, with limits on time, memory, files and processes, without network.

The caller decides whether an output is right, outside the process of the code. A failed test is an outcome; a sandbox
that cannot start is a SandboxError. `Report.missing_isolation` lists the isolation that this kernel does not support.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlfuse.rewards.sandbox.bare_python import START_S, SandboxError, start_python
from rlfuse.rewards.sandbox.messages import MessageError, decode, encode, pack, unpack_all

PREFIX = "rlfuse_sandbox_"


class Kind(StrEnum):
    """Kind of test."""

    PROGRAM = "program"
    """A test is a text: the code runs with it as stdin, and the value is its stdout."""
    CALLS = "calls"
    """A test is a list of arguments: the value is the return value of `fn_name`. Both are plain data."""
    ASSERTS = "asserts"
    """A test is a text of statements that call functions of the code and raise on failure; the value is True."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of the code."""

    timeout_s: float = 5.0
    """CPU time per test in seconds; wall time is limited to three times that."""
    total_s: float = 20.0
    """Seconds for all tests of one response; unfinished tests fail. Keep reward.timeout_s above it."""
    memory_mb: int = 1024
    file_mb: int = 16
    """MiB per file; twice that for all files together, including unlinked ones. Limits are checked every 10 ms, so
    writes between two checks may exceed them."""
    output_kb: int = 1024
    demand_isolation: bool = False
    """Do not run code if the kernel does not support full isolation."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "total_s", "memory_mb", "file_mb", "output_kb"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"Limits: got {name}={value!r}; it must be a number above 0")
        if self.memory_mb < 128:
            raise ValueError(f"Limits: got memory_mb={self.memory_mb}; Python itself needs 128")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one test."""

    value: Any = None
    reason: str | None = None
    """timeout | memory | exception | wrong (an assertion failed) | output | files | exit | crash."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Outcomes of all tests, in order, and the isolation that was missing ("" if none)."""

    outcomes: list[Outcome]
    missing_isolation: str


def run_code(
    code: str,
    kind: Kind,
    tests: Sequence[Any],
    *,
    fn_name: str | None = None,
    setup: str = "",
    limits: Limits | None = None,
) -> Report:
    """Run `code` against `tests`, each in a separate process. `setup`: statements that run before assertions.

    Raises SandboxError if the sandbox fails, ValueError for invalid tests or a `setup` that raises.
    """
    limits = limits or Limits()
    _check(kind, tests, fn_name, setup, limits)
    job = {
        "parent": os.getpid(),
        "code": code,
        "kind": str(kind),
        "fn_name": fn_name,
        "setup": setup,
        "tests": len(tests),
        "timeout_s": limits.timeout_s,
        "total_s": limits.total_s,
        "memory_bytes": limits.memory_mb * 2**20,
        "file_bytes": limits.file_mb * 2**20,
        "output_bytes": limits.output_kb * 2**10,
        "demand": limits.demand_isolation,
    }
    stream = b"".join(map(pack, [job, *(encode(list(t)) if kind is Kind.CALLS else t for t in tests)]))
    replies, problem = _run_host(stream, limits)
    if demanded := next((s["isolation"] for s in replies if limits.demand_isolation and s["isolation"]), None):
        raise SandboxError(
            f"demand_isolation: this machine can't fully isolate code: {demanded}. Fix that, or set it to false"
        )
    if fault := next((s["fault"] for s in replies if "fault" in s), None):
        raise ValueError(f"setup: {setup!r} raises {fault}; setup must run without the code")
    if problem and len(replies) < len(tests):
        raise SandboxError(f"the sandbox process ended before its tests: {problem}")
    unfinished = Outcome(reason="timeout", text=f"all tests took longer than {limits.total_s:g} s")
    outcomes = [_outcome(kind, reply) for reply in replies] + [unfinished] * (len(tests) - len(replies))
    return Report(outcomes, next((s["isolation"] for s in replies), "unknown: no test was started"))


def _run_host(stream: bytes, limits: Limits) -> tuple[list[dict[str, Any]], str]:
    _remove_stale_folders(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=PREFIX)
    lock = os.open(folder, os.O_RDONLY)
    host = None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        host = start_python("rlfuse.rewards.sandbox.host", folder)
        try:
            output, errors = host.communicate(stream, timeout=limits.total_s + START_S)
        except subprocess.TimeoutExpired:
            _kill(host)
            return unpack_all(host.communicate()[0]), ""
        problem = errors.decode(errors="replace").strip().splitlines()[-1:] if host.returncode else []
        return unpack_all(output), problem[
            0
        ] if problem else f"exit status {host.returncode}" if host.returncode else ""
    except (OSError, MessageError) as error:
        raise SandboxError(f"the sandbox process could not be used: {error}") from error
    finally:
        if host is not None:
            _kill(host)
            host.wait()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@functools.cache
def _remove_stale_folders(temporary: str) -> None:
    """Remove folders left by processes that were killed during a test. Runs once per process."""
    for folder in Path(temporary).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # owned by another user, or removed meanwhile
            place = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(place).st_mtime > START_S:
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(place)


def _kill(host: subprocess.Popen[bytes]) -> None:
    """Kill the process group: the host and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)


def _outcome(kind: Kind, reply: dict[str, Any]) -> Outcome:
    if "reason" in reply:
        return Outcome(reason=reply["reason"], text=reply["text"])
    try:
        return Outcome(decode(reply["value"]) if kind is Kind.CALLS else reply["value"])
    except (MessageError, RecursionError) as error:
        return Outcome(reason="output", text=f"returned an unreadable value: {error}")


def _check(kind: Kind, tests: Sequence[Any], fn_name: str | None, setup: str, limits: Limits) -> None:
    if not tests:
        raise ValueError("tests: got none; at least one is required")
    if kind is Kind.CALLS and not fn_name:
        raise ValueError("fn_name: got None; kind=calls requires the name of the function to call")
    for number, test in enumerate(tests):
        if isinstance(test, str) is (kind is Kind.CALLS):
            valid = "a list of arguments" if kind is Kind.CALLS else "a text"
            raise ValueError(f"tests[{number}]: got {test!r}; kind={kind} requires {valid}")
        if kind is Kind.PROGRAM and len(test.encode()) > limits.file_mb * 2**20:
            raise ValueError(f"tests[{number}]: {len(test)} characters of input exceed file_mb={limits.file_mb}")
    for name, source in (("setup", setup), *(("tests", test) for test in tests if kind is Kind.ASSERTS)):
        try:
            compile(source, f"<{name}>", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{name}: got {source!r}; it must be valid Python ({error})") from None
