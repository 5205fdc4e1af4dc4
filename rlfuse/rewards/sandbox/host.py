"""The process that runs untrusted code, one test after the other; started by `sandbox`, never imported by a run.

    sandbox (reward worker) --job, tests--> host --requests--> candidate: a fork for each test, confined, runs the code
                            <---outcomes---      <--replies---

A candidate is forked before its test is read and has none of the host's pipes: neither expected values nor the way to
report success are in its memory. Nothing runs before the candidate has reported its isolation. A test may use
`timeout_s` of CPU time and BUSY times that in all; all tests together `total_s`.
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
"""How often limits are looked at: what code takes in between comes on top, at most some GB/s for each processor."""
WALL_TIME_FACTOR = 3
"""So much longer than its CPU time may a test take."""
MAX_FILES = 1000
MAX_THREADS = 500
OPEN_FILES = 64
MAX_DEPTH = 200
"""Levels of JSON; a tuple or a set takes two, a dict three."""
MAX_TEXT = 300
NAME = "<solution>"


class TestAborted(BaseException):
    """The test is over: a limit was reached or the candidate is gone. No test's `except Exception` catches it."""

    def __init__(self, reason: str, text: str):
        super().__init__(reason, text)
        self.outcome = {"reason": reason, "text": text}


class CodeError(Exception):
    """The code raised an exception that Python does not come with."""


def main() -> None:
    """Read the job from standard input, write one outcome for each test to standard output."""
    job = receive(0)
    die_with_parent(job["parent"])
    limit(job["memory_bytes"], math.ceil(job["total_s"]) + 2, job["file_bytes"], OPEN_FILES)
    confine_files([os.getcwd()], ["/proc"])  # of processes, Landlock shows their own user only those it confines too
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
            _watch(job, candidate, end)
            outcome = {"program": _program, "calls": _call, "asserts": _assert}[job["kind"]](candidate, job, test)
        except TestAborted as stopped:
            outcome = stopped.outcome
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a look that is due would set the timer again
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
        return {"reason": _reason(reply["error"]), "text": _headline(reply)}
    return {"value": output}


def _call(candidate: Candidate, job: dict[str, Any], arguments: Any) -> dict[str, Any]:
    reply = candidate.ask(job["fn_name"], arguments)
    if "error" in reply:
        return {"reason": _reason(reply["error"]), "text": _headline(reply)}
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
        said = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        if isinstance(error, AssertionError):
            return {"reason": "wrong", "text": f"{said} in {source.strip()[:MAX_TEXT]}"}
        return {"reason": _reason(type(error).__name__), "text": said}
    finally:
        names.clear()  # functions hold on to it, and so to the test, where the next candidate could find it
    return {"value": True}


class _Names(dict):
    """Global names of a test: tested code cannot replace the `sorted` or `all` that judges it."""

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
        raise (kind(reply.get("message")) if known else CodeError(_headline(reply)))


class Candidate:
    """One forked process with the code, as the host sees it."""

    def __init__(self, job: dict[str, Any]):
        self._most = job["output_bytes"]
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
        """What is missing of the isolation; "" where nothing is. Said before the code runs."""
        try:
            return str(receive(self._replies, self._most))
        except EOFError:
            raise RuntimeError("the process for the code ended before it ran any") from None

    def cpu_s(self) -> float:
        try:
            return time.clock_gettime(~self._pid << 3 | 2)  # its clock, as clock_getcpuclockid(3) names it
        except OSError:
            return 0.0

    def threads(self) -> int:
        return len(resource_usage.threads(self._pid))

    def files(self, file_bytes: int) -> dict[int, int]:
        if os.stat(".").st_mtime_ns == self._untouched:  # each file has a name at first
            return {}
        found = resource_usage.files(self._pid, OPEN_FILES, file_bytes)
        found.pop(os.fstat(self._input).st_ino, None)
        return found

    def run(self, given: str, most: int) -> str:
        os.write(self._input, given.encode())
        os.lseek(self._input, 0, os.SEEK_SET)
        self._send({})
        parts, size = [], 0
        while part := os.read(self._output, 2**16):
            parts.append(part)
            size += len(part)
            if size > most:
                raise TestAborted("output", f"wrote more than {most} bytes")
        return b"".join(parts).decode(errors="replace")

    def ask(self, name: str, arguments: Any, named: Any = None) -> dict[str, Any]:
        self._send({"name": name, "arguments": arguments, "named": named or {"dict": []}})
        reply = self.reply()
        if reply is None:
            self.died()
        return reply

    def reply(self) -> dict[str, Any] | None:
        try:
            reply = receive(self._replies, self._most)
        except EOFError:
            return None
        except (MessageError, MemoryError) as error:
            raise TestAborted("output", f"returned what can't be read: {str(error)[:MAX_TEXT]}") from None
        if not isinstance(reply, dict) or _nested(reply):
            raise TestAborted(
                "output", f"returned what can't be read: no value, or one more than {MAX_DEPTH} levels deep"
            )
        return reply

    def died(self, allowed: int | None = None) -> None:
        """Stop, for the reason that the process ended for, unless with the exit status `allowed`."""
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if self._status == -signal.SIGXCPU:
            raise TestAborted("timeout", "used up its CPU time")
        if self._status < 0:
            raise TestAborted("crash", f"died of {signal.Signals(-self._status).name}")
        if self._status != allowed:
            raise TestAborted("exit", f"ended the process with status {self._status}")

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


def _watch(job: dict[str, Any], candidate: Candidate, end: float) -> None:
    """Raise Stopped wherever the host is, as soon as time is over or too much was written."""
    late = time.monotonic() + WALL_TIME_FACTOR * job["timeout_s"]

    def stop(reason: str, text: str) -> NoReturn:
        # Once more only for a test that catches everything, and not on the way out.
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        raise TestAborted(reason, text)

    def look(*_: Any) -> None:
        if candidate.cpu_s() > job["timeout_s"] or time.monotonic() > late:
            stop("timeout", f"took longer than {job['timeout_s']:g} s")
        if time.monotonic() > end:
            stop("timeout", f"all tests took longer than {job['total_s']:g} s")
        if candidate.threads() > MAX_THREADS:
            stop("memory", f"started more than {MAX_THREADS} threads")
        files = candidate.files(job["file_bytes"])
        if len(files) > MAX_FILES or sum(files.values()) > 2 * job["file_bytes"]:
            stop("files", f"wrote more than {2 * job['file_bytes']} bytes or {MAX_FILES} files")

        signal.setitimer(signal.ITIMER_REAL, TICK_S)  # only now: a look that takes longer is not looked into

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, TICK_S)


def _clear() -> None:
    with os.scandir() as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                os.unlink(entry)


def _candidate(job: dict[str, Any], host: int, given: int, output: int, requests: int, replies: int) -> NoReturn:
    """Run in the fork: confine, report, execute, answer calls."""
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
        sys.setrecursionlimit(50_000)  # as where public data sets run code
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
            problem = _described(error, module.__dict__)
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
    except BaseException as error:
        problem = problem or _described(error, module.__dict__)
    finally:
        os.close(1)
    return problem


def _run_module(code: str) -> tuple[dict[str, Any], dict[str, Any]]:
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            return {}, _described(error, module.__dict__)
    return module.__dict__, {}


def _answer(namespace: dict[str, Any], request: dict[str, Any], most: int) -> bytes:
    try:
        function = namespace.get(request["name"])
        if function is None and "Solution" in namespace:
            function = getattr(namespace["Solution"](), request["name"], None)
        if function is None:
            return pack({"error": "NameError", "message": f"the code defines no {request['name']}"})
        value = function(*decode(request["arguments"]), **decode(request["named"]))
        if isinstance(value, str | bytes | list | tuple | set | dict) and len(value) > most:
            return pack({"error": "ValueError", "message": f"returned {len(value)} entries; {most} at most"})
        return pack({"value": encode(value)})
    except BaseException as error:
        return pack(_described(error, {}))


def _described(error: BaseException, namespace: dict[str, Any]) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        namespace.clear()  # room for the words that say so
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    try:
        name, message = type(error).__name__ + "", "".join(str(error)[:MAX_TEXT])
    except BaseException as other:  # the code's own class may say anything
        name, message = "Exception", f"one that raises {type.__repr__(type(other))} when asked what it is"
    return {"error": name, "message": message, "line": frames[-1] if frames else None}


def _nested(value: Any) -> bool:
    """Return whether JSON is too deep for its readers."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            entry
            for inner in layer
            if isinstance(inner, list | dict)
            for entry in (inner.values() if isinstance(inner, dict) else inner)
        ]
    return bool(layer)


def _headline(reply: dict[str, Any]) -> str:
    said = f"{reply.get('error')}: {reply.get('message')}" if reply.get("message") else str(reply.get("error"))
    return f"{said[:MAX_TEXT]} (line {reply['line']})" if isinstance(reply.get("line"), int) else said[:MAX_TEXT]


def _reason(error: Any) -> str:
    return "memory" if error == "MemoryError" else "exception"
