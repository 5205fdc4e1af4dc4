"""Report the last event and the stacks of each process of a run, during long waits or on `kill -USR1 <driver>`.

    RUN_FOLDER/stacks/{time}.txt                  all processes at that time, longest without an event first
    RUN_FOLDER/stacks/processes/{where}.{pid}     latest event of a process
    RUN_FOLDER/stacks/processes/{where}.{pid}.txt its stacks, written on SIGUSR1

Only registered processes are signalled. They answer even inside native code that holds the GIL.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from rlfuse import clock
from rlfuse.cluster import host_memory, process_logs
from rlfuse.events import Recorder

FOLDER = "RLFUSE_STACKS"
"""Environment variable: folder of the stacks of a run."""
HEAD, LAST = 256, 128
"""Bytes of the constant header in the file of a process, and of its latest event."""
TRACEBACK = "RLFUSE_TRACEBACK"
"""Environment variable: 1 shows errors with full tracebacks."""
ANSWER_S = 2.0
WARN_AT_SHARE = 0.5
"""Fraction of a wait's limit after which it is reported, while there is time to act."""
SPACING_S = 5.0
"""Minimum time between dumps: simultaneous hangs share one dump."""

_current: ContextVar[Watchdog | None] = ContextVar("watchdog", default=None)
_open: list[Any] = []  # kept open, since faulthandler writes to their descriptors


def environment() -> dict[str, str]:
    """Return the variables for processes that do not inherit this environment."""
    names = (FOLDER, process_logs.FOLDER, TRACEBACK)
    return {name: os.environ[name] for name in names if name in os.environ}


def register(where: str, recorder: Recorder | None = None) -> None:
    """Register a worker for stack dumps and keep its output; no-op outside a run."""
    process_logs.redirect_output(where)
    _show(where, recorder)


def _show(where: str, recorder: Recorder | None, chain: bool = False) -> None:
    folder = Path(os.environ.get(FOLDER, "")) / "processes"
    if not os.environ.get(FOLDER) or not folder.is_dir():
        return
    path = folder / f"{where.replace('/', '-')}.{os.getpid()}"
    stacks = path.with_name(path.name + ".txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=chain)
    slate = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    head = {"where": where, "pid": os.getpid(), "host": socket.gethostname(), "device": device}
    head |= {"started": clock.process_start_ticks(os.getpid()), "at": clock.now()}
    os.pwrite(slate, json.dumps(head).encode().ljust(HEAD), 0)
    _open[:] = [stacks, os.fdopen(slate, "r+b", 0)]

    def record_event(event: str) -> None:
        with suppress(OSError):  # a full disk must not stop the process
            text = f"{clock.now():.3f} {host_memory.resident_mib()} {event}"
            os.pwrite(slate, text.encode().ljust(LAST)[:LAST], HEAD)

    if recorder is not None:
        recorder.listeners.append(record_event)
        record_event("started")


@dataclass(frozen=True, slots=True)
class _Process:
    """A registered process, which answers SIGUSR1."""

    where: str
    pid: int
    host: str
    started: int
    """As `clock.process_start_ticks`, since process ids are reused."""
    at: float
    mib: int
    event: str
    path: Path
    device: str

    @classmethod
    def read(cls, path: Path) -> _Process:
        content = path.read_bytes()
        head, text = json.loads(content[:HEAD]), content[HEAD:].decode(errors="replace").strip()
        at, mib, event = text.split(" ", 2) if text else (head["at"], 0, "unknown")
        return cls(**(head | {"at": float(at)}), mib=int(mib), event=event, path=path)

    @property
    def stacks(self) -> Path:
        return self.path.with_name(self.path.name + ".txt")

    @property
    def state(self) -> str:
        if self.host != socket.gethostname():
            return "elsewhere"
        try:
            same = clock.process_start_ticks(self.pid) == self.started
            return psutil.Process(self.pid).status() if same else "gone"
        except (OSError, psutil.NoSuchProcess):
            return "gone"

    def last_event_text(self) -> str:
        return f"last event: {self.event}, {clock.now() - self.at:.1f} s ago; the process is {self.state}"

    def ask(self) -> int | None:
        """Request its stacks. Return the size of its file before, or None if it cannot be signalled."""
        if self.state in ("gone", "elsewhere", psutil.STATUS_ZOMBIE):
            return None
        written = self.stacks.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        return written

    def answer(self, before: int) -> str:
        with self.stacks.open() as file:
            file.seek(before)
            return file.read()


class Watchdog:
    """Watchdog of the driver. `say` prints a line for the user."""

    def __init__(self, folder: Path, recorder: Recorder, say: Callable[[str], None]):
        self.folder, self._recorder, self._say = folder / "stacks", recorder, say
        self._last: tuple[float, Path] | None = None

    def overdue(self, worker: str, action: str, waited_s: float, limit_s: float) -> None:
        self._say(
            f"{worker} has taken {waited_s:g} s of {limit_s:g} (cluster.timeout_s) to {action}. {self.evidence(worker)}"
        )

    def dump_on_request(self) -> None:
        self._say(f"SIGUSR1: {self.dump('requested by SIGUSR1')}")

    def evidence(self, worker: str) -> str:
        facts = [f"{each.where}: {each.last_event_text()}." for each in self._living() if each.where == worker]
        try:
            return " ".join([*facts, f"Stacks of all processes: {self.dump(f'waiting for {worker}')}"])
        except OSError as error:
            return " ".join([*facts, f"Stacks could not be written: {error}"])

    def dump(self, reason: str) -> Path:
        if self._last and time.monotonic() - self._last[0] < SPACING_S:
            return self._last[1]
        others = [each for each in self._living() if each.pid != os.getpid()]
        requests = {each.path: each.ask() for each in others}
        answers = self._answers({each: requests[each.path] for each in others})
        path = self.folder / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.txt"
        with path.open("a") as file:
            file.write(f"{reason}\n")
            for each in sorted(others, key=lambda each: each.at):
                file.write(
                    f"\n== {each.where} (process {each.pid} on {each.host}; {each.last_event_text()})\n{answers[each]}"
                )
            file.write(f"\n== driver (process {os.getpid()})\n")
            for span in self._recorder.open.values():
                file.write(
                    f"under way for {clock.now() - span.start:.1f} s: {span.kind} {' '.join(span.samples[:4])}\n"
                )
            _write_tasks(file)
            faulthandler.dump_traceback(file, all_threads=True)
        self._last = time.monotonic(), path
        return path

    def _answers(self, requests: dict[_Process, int | None]) -> dict[_Process, str]:
        texts, deadline = dict.fromkeys(requests, ""), time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = {each: each.answer(before) for each, before in requests.items() if before is not None}
            if all(text and text == texts[each] for each, text in now.items()):
                break
            texts |= now
        return {each: text or "no answer\n" for each, text in texts.items()}

    def _processes(self) -> list[_Process]:
        return _registered(self.folder)

    def _living(self) -> list[_Process]:
        return [each for each in self._processes() if each.state != "gone"]


@dataclass(frozen=True, slots=True)
class Registered:
    """A process of the run, with its first visible CUDA device (empty: none)."""

    where: str
    pid: int
    device: str


def registered() -> list[Registered]:
    """Return the registered processes of the run that are alive on this host."""
    folder, host = os.environ.get(FOLDER), socket.gethostname()
    found = _registered(Path(folder)) if folder else []
    return [
        Registered(each.where, each.pid, each.device) for each in found if each.host == host and each.state != "gone"
    ]


def _registered(folder: Path) -> list[_Process]:
    files = [path for path in (folder / "processes").glob("*") if path.suffix != ".txt"]
    return [_Process.read(path) for path in files if path.stat().st_size >= HEAD]


def _write_tasks(file: TextIO) -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop is running
        return
    for task in tasks:
        file.write(f"task {task.get_name()}\n")
        waiting = task.get_coro()
        while (frame := _frame(waiting)) is not None:
            file.write(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}\n')
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)


def _frame(waiting: Any) -> FrameType | None:
    return getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)


@contextmanager
def watching(folder: Path, recorder: Recorder, say: Callable[[str], None]) -> Iterator[Watchdog]:
    """Watch the processes of a run in `folder`: those started in this block can report their stacks."""
    watchdog = Watchdog(folder, recorder, say)
    shutil.rmtree(watchdog.folder / "processes", ignore_errors=True)  # left by a killed run
    (watchdog.folder / "processes").mkdir(parents=True)
    os.environ[FOLDER] = str(watchdog.folder)
    process_logs.begin(folder.absolute() / "logs")
    before = _on_demand(watchdog.dump_on_request)
    _show("driver", recorder, chain=True)
    token = _current.set(watchdog)
    try:
        yield watchdog
    finally:
        _current.reset(token)
        os.environ.pop(FOLDER)
        process_logs.end()
        faulthandler.unregister(signal.SIGUSR1)
        if before is not None:
            signal.signal(signal.SIGUSR1, before)
        shutil.rmtree(watchdog.folder / "processes", ignore_errors=True)
        with suppress(OSError):
            watchdog.folder.rmdir()


def _on_demand(action: Callable[[], None]) -> Any:
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGUSR1, lambda *_: action())


@contextmanager
def waiting(worker: str, action: str, limit_s: float) -> Iterator[None]:
    """Report a wait of at most `limit_s` with all stacks once half of the limit is over."""
    watchdog = _current.get()
    if watchdog is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(
        WARN_AT_SHARE * limit_s, watchdog.overdue, worker, action, WARN_AT_SHARE * limit_s, limit_s
    )
    try:
        yield
    finally:
        timer.cancel()


def evidence(worker: str) -> str:
    """Describe the state of `worker` for a timeout message, with a leading space; may be empty."""
    watchdog = _current.get()
    return f" {watchdog.evidence(worker)}" if watchdog else ""


def last_event(worker: str, pid: str) -> str:
    """Describe the last event and memory of a dead process, with a leading space; may be empty."""
    watchdog = _current.get()
    for each in watchdog._processes() if watchdog else []:
        if (each.where, str(each.pid)) == (worker, pid) and each.mib:  # without a recorder it has no events
            ago = f"{clock.now() - each.at:.1f} s ago"
            return f" Its last event: {each.event} with {each.mib} MiB in memory, {ago}."
    return ""


def say(text: str) -> None:
    """Print a line for the user: through the log of the run, or on stderr outside a run."""
    if watchdog := _current.get():
        watchdog._say(text)
    else:
        print(text, file=sys.stderr, flush=True)


def is_stopped(worker: str) -> bool:
    """Return whether a process of `worker` on this host is stopped by a signal."""
    watchdog = _current.get()
    found = [each.state for each in watchdog._living() if each.where == worker] if watchdog else []
    return psutil.STATUS_STOPPED in found


async def stack_of(worker: str) -> str:
    """Return the stack of `worker`'s main thread, innermost call first; empty if it does not answer."""
    watchdog = _current.get()
    found = [each for each in watchdog._living() if each.where == worker] if watchdog else []
    text, deadline = "", time.monotonic() + ANSWER_S
    for process in found:
        before, again = process.ask(), ""
        while before is not None and time.monotonic() < deadline and not (text and text == again):
            await asyncio.sleep(0.02)
            text, again = process.answer(before), text
    return text.partition("Current thread")[2].partition("\n\n")[0].partition("\n")[2]
