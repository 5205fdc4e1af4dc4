"""Run untrusted Python against tests, bounded in time, memory, files and processes, without network.

Whether an output is right is decided by the caller, outside of the code's process. A failed test is an outcome; a
sandbox that cannot start is a SandboxError. `Report.missing_isolation` lists the isolation that this kernel lacks.
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
    """What a test is."""

    PROGRAM = "program"
    """A text: the whole code runs with it as standard input; the value is what it wrote to standard output."""
    CALLS = "calls"
    """A list of arguments: the value is what `fn_name` returns for them; plain data both ways."""
    ASSERTS = "asserts"
    """Statements that call the code's functions by name and raise where one is wrong; the value is True."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What code may use."""

    timeout_s: float = 5.0
    """CPU time of each test; three times as long in all."""
    total_s: float = 20.0
    """For all tests of one response; what is not done by then has failed. Keep reward.timeout_s above it."""
    memory_mb: int = 1024
    file_mb: int = 16
    """Of one file, and half of what files may hold altogether, those without a name included. What is written between
    two looks, 10 ms apart on a machine that is not overloaded, comes on top."""
    output_kb: int = 1024
    demand_isolation: bool = False
    """Refuse to run code where the kernel can't isolate it fully."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "total_s", "memory_mb", "file_mb", "output_kb"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"Limits: got {name}={value!r}; valid are numbers above 0")
        if self.memory_mb < 128:
            raise ValueError(f"Limits: got memory_mb={self.memory_mb}; Python itself takes 128")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test."""

    value: Any = None
    reason: str | None = None
    """timeout | memory | exception | wrong (an assertion failed) | output | files | exit | crash."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Of all tests, in order."""

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
    """Run `code` against `tests`, each in a process of its own. `setup` is what assertions need in front.

    SandboxError where the sandbox fails; ValueError for tests that can't be run or a `setup` that raises.
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
    said, problem = _converse(stream, limits)
    if demanded := next((s["isolation"] for s in said if limits.demand_isolation and s["isolation"]), None):
        raise SandboxError(
            f"demand_isolation: code can't be isolated fully here: {demanded}. Allow less, or change that"
        )
    if fault := next((s["fault"] for s in said if "fault" in s), None):
        raise ValueError(f"setup: got {setup!r}, which raises {fault}; valid are statements that run without the code")
    if problem and len(said) < len(tests):
        raise SandboxError(f"the process for code ended before its tests: {problem}")
    late = Outcome(reason="timeout", text=f"all tests took longer than {limits.total_s:g} s")
    outcomes = [_outcome(kind, one) for one in said] + [late] * (len(tests) - len(said))
    return Report(outcomes, next((s["isolation"] for s in said), "unknown: no test was begun"))


def _converse(stream: bytes, limits: Limits) -> tuple[list[dict[str, Any]], str]:
    _clear_left(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=PREFIX)
    owned = os.open(folder, os.O_RDONLY)
    host = None
    try:
        fcntl.flock(owned, fcntl.LOCK_SH)
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
        raise SandboxError(f"the process for code could not be used: {error}") from error
    finally:
        if host is not None:
            _kill(host)
            host.wait()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owned)


@functools.cache
def _clear_left(temporary: str) -> None:
    """Remove, once per process, unlocked folders of processes that were killed during a test."""
    for folder in Path(temporary).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or one that ends just now
            place = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(place).st_mtime > START_S:
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(place)


def _kill(host: subprocess.Popen[bytes]) -> None:
    """Kill the process group: the host and what it may have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)


def _outcome(kind: Kind, said: dict[str, Any]) -> Outcome:
    if "reason" in said:
        return Outcome(reason=said["reason"], text=said["text"])
    try:
        return Outcome(decode(said["value"]) if kind is Kind.CALLS else said["value"])
    except (MessageError, RecursionError) as error:
        return Outcome(reason="output", text=f"returned what can't be read: {error}")


def _check(kind: Kind, tests: Sequence[Any], fn_name: str | None, setup: str, limits: Limits) -> None:
    if not tests:
        raise ValueError("tests: got none; give one at least")
    if kind is Kind.CALLS and not fn_name:
        raise ValueError("fn_name: got None; name the function that is to be called")
    for number, test in enumerate(tests):
        if isinstance(test, str) is (kind is Kind.CALLS):
            valid = "a list of arguments" if kind is Kind.CALLS else "a text"
            raise ValueError(f"tests[{number}]: got {test!r}; valid for {kind} is {valid}")
        if kind is Kind.PROGRAM and len(test.encode()) > limits.file_mb * 2**20:
            raise ValueError(f"tests[{number}]: {len(test)} characters of input; file_mb={limits.file_mb} is less")
    for name, source in (("setup", setup), *(("tests", test) for test in tests if kind is Kind.ASSERTS)):
        try:
            compile(source, f"<{name}>", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{name}: got {source!r}; valid are Python statements ({error})") from None
