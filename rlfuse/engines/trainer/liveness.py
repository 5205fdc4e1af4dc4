"""Detect trainer ranks that make no progress in a call.

A rank that computes is alive however long it takes (on GPUs CPU time is no evidence, as a thread that waits for the
device spins). A rank that waits in a collective, or has joined more collectives than another, does not hang unless all
ranks make no progress for long. Only time observed by the driver counts.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from rlfuse.cluster.tracebacks import LIBRARY
from rlfuse.engines.rollout.liveness import MIN_CPU_SHARE, children_cpu
from rlfuse.engines.trainer.backends import BACKENDS

WATCH = "watch"
"""Ray's concurrency group of a rank's `pulse`."""
COLD_START_FACTOR = 5
"""Factor on the limit for the first call of a kind on GPUs, which compiles kernels and creates communicators, and for
all ranks in a collective, which may be slow on the network."""
MAX_FRAMES_READ = 60
"""Frames of a stack that are read."""
MAX_FRAMES_SHOWN = 8
"""Frames that a report shows: the innermost one and those outside libraries."""
BACKEND_PATTERNS = chain.from_iterable(backend.wait_patterns for backend in BACKENDS.values())
WAIT_PATTERN = re.compile("|".join(("/torch/distributed/", r"/rlfuse/engines/pipeline/waits\.py", *BACKEND_PATTERNS)))
"""Stack frames in which a rank waits for others."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """State of a rank at one request."""

    activity: int
    """Number of signs of progress so far."""
    last: str
    """Description of its last activity."""
    stack: tuple[str, ...] = ()
    """Stack of the call thread, innermost frame first; empty between calls."""
    joined: Mapping[str, int] = field(default_factory=dict)
    """Process group -> number of collectives it has joined."""
    on_gpu: bool = False

    @property
    def is_waiting(self) -> bool:
        """True if the call thread waits for other ranks."""
        return any(map(WAIT_PATTERN.search, self.stack))

    def is_ahead_of(self, other: Pulse) -> bool:
        """Return whether this rank has joined a collective that the other one has not."""
        return any(other.joined.get(group, count) < count for group, count in self.joined.items())


class Progress:
    """Progress of this process. `joined`: returns the collectives by process group, as in a `Pulse`."""

    def __init__(self, device: str, joined: Callable[[], Mapping[str, int]] = dict):
        self._on_gpu, self._joined = device != "cpu", joined
        self._done, self._looks, self._last = 0, 0, "its start"
        self._seen = dict.fromkeys(self._counts(), (time.monotonic(), 0.0))
        self.thread = self.native_thread = 0
        """Identifiers of the call thread, of Python and of the system."""

    def set_call_thread(self) -> None:
        """Register the calling thread as the thread that runs calls."""
        self.thread, self.native_thread = threading.get_ident(), threading.get_native_id()

    def record_activity(self, what: str) -> None:
        """Record that an activity began or ended."""
        self._done += 1
        self._last = f"{what} at {time.strftime('%H:%M:%S')}"

    def follow(self, module: Any) -> None:
        """Count every layer run and every gradient accumulated in `module` as progress."""

        def passed(*_: Any) -> None:
            self._done += 1

        for part in module.modules():
            for layer in part if type(part).__name__ == "ModuleList" else ():
                layer.register_forward_pre_hook(passed)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(passed)

    def pulse(self) -> Pulse:
        """Return this rank's state; called on another thread than the call thread."""
        stack = tuple(frames_of(sys._current_frames().get(self.thread)))
        if not stack or any(map(self._grew, self._counts())):
            self._looks += 1
        return Pulse(self._done + self._looks, self._last, stack, self._joined(), self._on_gpu)

    def _counts(self) -> tuple[Callable[[], float], ...]:
        """Return counters of CPU seconds that show computation, cheapest first: reading child processes opens many
        files, which is slow while another thread computes in Python."""
        return (children_cpu,) if self._on_gpu else (self._own_cpu, children_cpu)

    def _grew(self, count: Callable[[], float]) -> bool:
        """Return whether the counter grew since its last reading as fast as computation makes it grow."""
        now, computed = time.monotonic(), count()
        since, before = self._seen[count]
        self._seen[count] = now, computed
        return computed - before > MIN_CPU_SHARE * (now - since)

    def _own_cpu(self) -> float:
        """Return seconds that the call thread ran or queued for a core."""
        try:
            ran, queued, _ = Path(f"/proc/self/task/{self.native_thread}/schedstat").read_text().split()
            return (int(ran) + int(queued)) / 1e9
        except OSError:  # some kernels have no schedstat
            return time.clock_gettime(time.pthread_getcpuclockid(self.thread))


def frames_of(frame: FrameType | None) -> Iterable[str]:
    """Yield a thread's frames in faulthandler's format, innermost first."""
    for _ in range(MAX_FRAMES_READ):
        if frame is None:
            return
        yield f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        frame = frame.f_back


class HangDetector:
    """Detector of hung ranks in one call.

    `limit_s`: limit without progress or without an answer; `first`: first call of its kind.
    """

    def __init__(self, limit_s: float, first: bool = False):
        self._limit_s, self._first = limit_s, first
        self._last: dict[int, Pulse] = {}
        self._still: dict[int, float] = {}
        self._silent: dict[int, float] = {}

    def check(self, seconds: float, pulses: Mapping[int, Pulse | None]) -> int | None:
        """Return a rank that hangs, or None.

        `pulses`: of ranks whose call has not ended, None for those that have not answered; `seconds`: since the last
        check, of which at most half the limit counts, as the driver may have been blocked.
        """
        seconds = min(seconds, self._limit_s / 2)
        for rank, pulse in pulses.items():
            before = self._last.get(rank)
            if pulse is None:
                self._silent[rank] = self._silent.get(rank, 0.0) + seconds
                continue
            moved = before is None or before.activity != pulse.activity
            self._still[rank] = 0.0 if moved else self._still[rank] + seconds
            self._silent[rank], self._last[rank] = 0.0, pulse
        if silent := [rank for rank in pulses if self._silent[rank] >= self._limit_s]:
            return max(silent, key=self._silent.__getitem__)
        still = self._still_for(1, pulses)
        hung = [rank for rank in still if not self.is_waiting_for(rank, pulses)]
        if not hung and len(still := self._still_for(COLD_START_FACTOR, pulses)) == len(pulses):
            fewest = min(map(self._collectives, still), default=0)
            hung = [rank for rank in still if self._collectives(rank) == fewest]
        return max(hung, key=self._still.__getitem__, default=None)

    def _still_for(self, times: int, ranks: Iterable[int]) -> list[int]:
        """Return the ranks without progress for `times` times their limit."""
        return [rank for rank in ranks if rank in self._last and self._still[rank] >= times * self._limit(rank)]

    def is_waiting_for(self, rank: int, others: Iterable[int]) -> bool:
        """Return whether the rank waits for one of the others."""
        own = self._last.get(rank)
        return own is not None and (
            own.is_waiting or any(own.is_ahead_of(self._last[other]) for other in others if other in self._last)
        )

    def describe_hang(self, rank: int) -> str:
        """Describe a hung rank: the rest of a sentence whose subject is the rank."""
        pulse, silent = self._last.get(rank), self._silent[rank] > 0
        limit = f"(cluster.heartbeat_s={self._limit_s:g})"
        if silent:
            state, stack_title = (
                f"has not answered for {self._silent[rank]:.1f} s {limit}",
                "Its stack at its last answer",
            )
        else:
            state, stack_title = f"has made no progress for {self._still[rank]:.1f} s {limit}", "Its stack"
        if pulse is None:
            return state
        own = [frame for frame in pulse.stack[1:] if not LIBRARY.match(frame.split('"')[1])]
        stack = "".join(f"\n  {frame}" for frame in [*pulse.stack[:1], *own][:MAX_FRAMES_SHOWN])
        return f"{state}; last activity: {pulse.last}. {stack_title}, innermost call first:{stack}"

    def _limit(self, rank: int) -> float:
        pulse = self._last.get(rank)
        return self._limit_s * (COLD_START_FACTOR if self._first and pulse and pulse.on_gpu else 1)

    def _collectives(self, rank: int) -> int:
        return sum(self._last[rank].joined.values())
