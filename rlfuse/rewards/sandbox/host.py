"""Host process that runs untrusted code against tests, one after the other. Started by `sandbox`, never imported.

    sandbox (reward worker) --job, tests--> host --requests--> candidate: confined fork per test that runs the code
                            <---outcomes---      <--replies---

A candidate is forked before its test is read and has none of the host's pipes, so its memory contains neither expected
values nor a way to report success. No code runs before the candidate has reported its isolation.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

from rlfuse.rewards.sandbox import resource_usage
from rlfuse.rewards.sandbox.confinement import confine_calls, confine_files, die_with_parent, limit
from rlfuse.rewards.sandbox.known_names import known_names
from rlfuse.rewards.sandbox.messages import MessageError, decode, encode, pack, receive, send, write

TICK_S = 0.01
"""Interval of limit checks. In between, code can exceed its limits by a few GB/s per CPU core at most."""
WALL_TIME_FACTOR = 3
"""Limit of wall time as a multiple of the limit of CPU time."""
MAX_FILES = 1000
MAX_THREADS = 500
OPEN_FILES = 64
MAX_DEPTH = 200
"""Nesting levels of JSON; a tuple or set takes two, a dict three."""
MAX_TEXT = 300
NAME = "<solution>"


class TestAborted(BaseException):
    """The test ended early: a limit was exceeded or the candidate died. Not caught by `except Exception` in a test."""

    def __init__(self, reason: str, text: str):
        super().__init__(reason, text)
        self.outcome = {"reason": reason, "text": text}


class CodeError(Exception):
    """The code raised an exception that is not built in."""


def main() -> None:
    """Read the job from stdin and write one outcome per test to stdout."""
    job = receive(0)
    die_with_parent(job["parent"])
    limit(job["memory_bytes"], math.ceil(job["total_s"]) + 2, job["file_bytes"], OPEN_FILES)
    confine_files([os.getcwd()], ["/proc"])  # Landlock hides processes outside its domain
    job["known"] = known_names()
    end = time.monotonic() + job["total_s"]
    for _ in range(job["tests"]):
        send(1, _test(job, end))


def _test(job: dict[str, Any], end: float) -> dict[str, Any]:
    candidate = Candidate(job)
    try:
        test = receive(0)
        isolation = candidate.isolation()
        if isolation and job["demand"]:
            return {"isolation": isolation}
        try:
            _enforce_limits(job, candidate, end)
            outcome = {"program": _program, "calls": _call, "asserts": _assert}[job["kind"]](candidate, job, test)
        except TestAborted as stopped:
            outcome = stopped.outcome
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a pending check would restart the timer
            signal.setitimer(signal.ITIMER_REAL, 0)
        return {**outcome, "isolation": isolation}
    finally:
        candidate.end()
        _clear()


def _program(candidate: Candidate, job: dict[str, Any], given: str) -> dict[str, Any]:
    output = candidate.run(given, job["output_bytes"])
    reply = candidate.reply()
    if reply is None:
        candidate.died(allowed=0)
    if reply and "error" in reply:
        return {"reason": _reason(reply["error"]), "text": _format_error(reply)}
    return {"value": output}


def _call(candidate: Candidate, job: dict[str, Any], arguments: Any) -> dict[str, Any]:
    reply = candidate.ask(job["fn_name"], arguments)
    if "error" in reply:
        return {"reason": _reason(reply["error"]), "text": _format_error(reply)}
    return {"value": reply.get("value")}


def _assert(candidate: Candidate, job: dict[str, Any], source: str) -> dict[str, Any]:
    names = _Names(candidate, job["fn_name"])
    try:
        exec(compile(job["setup"], "<setup>", "exec"), names)
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}"[:MAX_TEXT]}
    try:
        exec(compile(source, "<test>", "exec"), names)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        if isinstance(error, AssertionError):
            return {"reason": "wrong", "text": f"{message} in {source.strip()[:MAX_TEXT]}"}
        return {"reason": _reason(type(error).__name__), "text": message}
    finally:
        names.clear()  # functions keep a reference to the test, which the next candidate could find
    return {"value": True}


class _Names(dict):
    """Global names of a test, in which tested code cannot replace builtins such as `sorted` or `all`."""

    def __init__(self, candidate: Candidate, fn_name: str | None):
        super().__init__(__name__="test")
        self._candidate = candidate
        if fn_name:
            self[fn_name] = functools.partial(self._call, fn_name)

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        reply = self._candidate.ask(name, encode(list(args)), encode(kwargs))
        if "error" not in reply:
            return decode(reply.get("value"))
        kind = getattr(builtins, str(reply["error"]), None)
        known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
        raise (kind(reply.get("message")) if known else CodeError(_format_error(reply)))


class Candidate:
    """Host's handle of one forked process that runs the code."""

    def __init__(self, job: dict[str, Any]):
        self._max_bytes = job["output_bytes"]
        self._input = os.memfd_create("input")
        self._untouched = os.stat(".").st_mtime_ns
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        host, self._pid = os.getpid(), os.fork()
        if not self._pid:
            _candidate(job, host, self._input, output, requests, replies)
        for ours in (requests, replies, output):
            os.close(ours)
        self._status: int | None = None

    def isolation(self) -> str:
        """Return which isolation is missing, "" if none. Received before the code runs."""
        try:
            return str(receive(self._replies, self._max_bytes))
        except EOFError:
            raise RuntimeError("the sandbox process ended before it ran the code") from None

    def cpu_s(self) -> float:
        try:
            return time.clock_gettime(~self._pid << 3 | 2)  # clock ID as in clock_getcpuclockid(3)
        except OSError:
            return 0.0

    def threads(self) -> int:
        return len(resource_usage.threads(self._pid))

    def files(self, file_bytes: int) -> dict[int, int]:
        if os.stat(".").st_mtime_ns == self._untouched:  # every new file changes the folder first
            return {}
        found = resource_usage.files(self._pid, OPEN_FILES, file_bytes)
        found.pop(os.fstat(self._input).st_ino, None)
        return found

    def run(self, given: str, max_bytes: int) -> str:
        os.write(self._input, given.encode())
        os.lseek(self._input, 0, os.SEEK_SET)
        self._send({})
        parts, size = [], 0
        while part := os.read(self._output, 2**16):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise TestAborted("output", f"wrote more than {max_bytes} bytes")
        return b"".join(parts).decode(errors="replace")

    def ask(self, name: str, arguments: Any, named: Any = None) -> dict[str, Any]:
        self._send({"name": name, "arguments": arguments, "named": named or {"dict": []}})
        reply = self.reply()
        if reply is None:
            self.died()
        return reply

    def reply(self) -> dict[str, Any] | None:
        try:
            reply = receive(self._replies, self._max_bytes)
        except EOFError:
            return None
        except (MessageError, MemoryError) as error:
            raise TestAborted("output", f"returned an unreadable value: {str(error)[:MAX_TEXT]}") from None
        if not isinstance(reply, dict) or _nested(reply):
            raise TestAborted(
                "output", f"returned what can't be read: no value, or one more than {MAX_DEPTH} levels deep"
            )
        return reply

    def died(self, allowed: int | None = None) -> None:
        """Raise TestAborted with the reason for the end of the process, unless its exit status is `allowed`."""
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if self._status == -signal.SIGXCPU:
            raise TestAborted("timeout", "used up its CPU time")
        if self._status < 0:
            raise TestAborted("crash", f"was killed by {signal.Signals(-self._status).name}")
        if self._status != allowed:
            raise TestAborted("exit", f"exited with status {self._status}")

    def end(self) -> None:
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        for ours in (self._input, self._requests, self._replies, self._output):
            os.close(ours)

    def _send(self, request: dict[str, Any]) -> None:
        try:
            send(self._requests, request)
        except BrokenPipeError:
            self.died()


def _enforce_limits(job: dict[str, Any], candidate: Candidate, end: float) -> None:
    """Set a timer that raises TestAborted in the host as soon as a limit is exceeded."""
    deadline = time.monotonic() + WALL_TIME_FACTOR * job["timeout_s"]

    def stop(reason: str, text: str) -> NoReturn:
        # Raise again every second for a test that catches BaseException.
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        raise TestAborted(reason, text)

    def check_limits(*_: Any) -> None:
        if candidate.cpu_s() > job["timeout_s"] or time.monotonic() > deadline:
            stop("timeout", f"took longer than {job['timeout_s']:g} s")
        if time.monotonic() > end:
            stop("timeout", f"all tests took longer than {job['total_s']:g} s")
        if candidate.threads() > MAX_THREADS:
            stop("memory", f"started more than {MAX_THREADS} threads")
        files = candidate.files(job["file_bytes"])
        if len(files) > MAX_FILES or sum(files.values()) > 2 * job["file_bytes"]:
            stop("files", f"wrote more than {2 * job['file_bytes']} bytes or {MAX_FILES} files")

        signal.setitimer(signal.ITIMER_REAL, TICK_S)  # last, so that checks do not overlap

    signal.signal(signal.SIGALRM, check_limits)
    signal.setitimer(signal.ITIMER_REAL, TICK_S)


def _clear() -> None:
    with os.scandir() as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                os.unlink(entry)


def _candidate(job: dict[str, Any], host: int, given: int, output: int, requests: int, replies: int) -> NoReturn:
    """Run in the fork: confine the process, report its isolation, execute the code, answer calls."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        die_with_parent(host)
        program = job["kind"] == "program"
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(given if program else silent, 0)
        os.dup2(output if program else silent, 1)
        os.dup2(silent, 2)
        requests, replies = os.dup2(requests, 62), os.dup2(replies, 63)
        os.closerange(3, 62)
        limit(job["memory_bytes"], math.ceil(job["timeout_s"]) + 2, job["file_bytes"], OPEN_FILES)
        vars(builtins).update(job["known"])
        sys.setrecursionlimit(50_000)  # as the harnesses of public data sets
        missing = [problem for problem in (confine_files([os.getcwd()]), confine_calls()) if problem]
        send(replies, "; ".join(missing))
        if program:
            receive(requests)
            send(replies, _run_program(job["code"]))
            os._exit(0)
        else:
            namespace, problem = _run_module(job["code"])
            while True:
                request = receive(requests)
                write(replies, pack(problem) if problem else _answer(namespace, request, job["output_bytes"]))
    finally:
        os._exit(70)


def _run_program(code: str) -> dict[str, Any]:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [NAME]
    problem: dict[str, Any] = {}
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            problem = _describe(error, module.__dict__)
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
    except BaseException as error:
        problem = problem or _describe(error, module.__dict__)
    finally:
        os.close(1)
    return problem


def _run_module(code: str) -> tuple[dict[str, Any], dict[str, Any]]:
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            return {}, _describe(error, module.__dict__)
    return module.__dict__, {}


def _answer(namespace: dict[str, Any], request: dict[str, Any], max_bytes: int) -> bytes:
    try:
        function = namespace.get(request["name"])
        if function is None and "Solution" in namespace:
            function = getattr(namespace["Solution"](), request["name"], None)
        if function is None:
            return pack({"error": "NameError", "message": f"the code does not define {request['name']}"})
        value = function(*decode(request["arguments"]), **decode(request["named"]))
        if isinstance(value, str | bytes | list | tuple | set | dict) and len(value) > max_bytes:
            return pack({"error": "ValueError", "message": f"returned {len(value)} entries; the limit is {max_bytes}"})
        return pack({"value": encode(value)})
    except BaseException as error:
        return pack(_describe(error, {}))


def _describe(error: BaseException, namespace: dict[str, Any]) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        namespace.clear()  # free memory for the message
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    try:
        name, message = type(error).__name__ + "", "".join(str(error)[:MAX_TEXT])
    except BaseException as other:  # __str__ of the code's exception class may raise
        name, message = "Exception", f"an exception whose message can't be read ({type.__repr__(type(other))})"
    return {"error": name, "message": message, "line": frames[-1] if frames else None}


def _nested(value: Any) -> bool:
    """Return whether JSON is nested more than MAX_DEPTH levels deep."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            entry
            for inner in layer
            if isinstance(inner, list | dict)
            for entry in (inner.values() if isinstance(inner, dict) else inner)
        ]
    return bool(layer)


def _format_error(reply: dict[str, Any]) -> str:
    text = f"{reply.get('error')}: {reply.get('message')}" if reply.get("message") else str(reply.get("error"))
    return f"{text[:MAX_TEXT]} (line {reply['line']})" if isinstance(reply.get("line"), int) else text[:MAX_TEXT]


def _reason(error: Any) -> str:
    return "memory" if error == "MemoryError" else "exception"
