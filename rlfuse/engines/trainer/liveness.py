"""Detect trainer ranks that make no progress in a call.

Role: a rank's `Progress` answers with a `Pulse` while another thread computes; the driver's `HangDetector` (pure) compares
those of all ranks in a call. Waits for nothing. Invariants: a rank that computes is alive however long it takes (on
GPUs a thread that waits for the device spins, so its CPU time says nothing); a rank that waits in a collective, or has
joined more of them than another, does not hang, unless all stand still for long; only time in which the driver looked
counts.
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
"""Times as long may ranks on GPUs stand still in the first call of a kind, which compiles kernels and makes
communicators, and all ranks in a collective, over a slow network."""
MAX_FRAMES_READ = 60
"""Frames that are looked at."""
MAX_FRAMES_SHOWN = 8
"""Of them: the innermost, and those of code that is no library's."""
BACKEND_PATTERNS = chain.from_iterable(backend.wait_patterns for backend in BACKENDS.values())
WAIT_PATTERN = re.compile("|".join(("/torch/distributed/", r"/rlfuse/engines/pipeline/waits\.py", *BACKEND_PATTERNS)))
"""Frames in which a rank waits for others."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How a rank was when asked."""

    activity: int
    """Of life, so far: another number than before says that it got on."""
    last: str
    """The last that it did, for people."""
    stack: tuple[str, ...] = ()
    """Where the thread of its calls stood, the innermost frame first; empty between calls."""
    joined: Mapping[str, int] = field(default_factory=dict)
    """Process group -> collectives that it has joined there."""
    on_gpu: bool = False

    @property
    def is_waiting(self) -> bool:
        """It stands in a wait for other ranks."""
        return any(map(WAIT_PATTERN.search, self.stack))

    def is_ahead_of(self, other: Pulse) -> bool:
        """The other one has yet to come to a collective that this one has joined."""
        return any(other.joined.get(group, count) < count for group, count in self.joined.items())


class Progress:
    """A rank's own. `joined`: collectives by process group, as in a `Pulse`."""

    def __init__(self, device: str, joined: Callable[[], Mapping[str, int]] = dict):
        self._on_gpu, self._joined = device != "cpu", joined
        self._done, self._looks, self._last = 0, 0, "its start"
        self._seen = dict.fromkeys(self._counts(), (time.monotonic(), 0.0))
        self.thread = self.native_thread = 0
        """That of the rank's calls, as Python and as the system number it."""

    def set_call_thread(self) -> None:
        """On the thread that is asked to."""
        self.thread, self.native_thread = threading.get_ident(), threading.get_native_id()

    def record_activity(self, what: str) -> None:
        """It began or ended something."""
        self._done += 1
        self._last = f"{what} at {time.strftime('%H:%M:%S')}"

    def follow(self, module: Any) -> None:
        """Every layer that is run and every gradient that is added is a sign of life."""

        def passed(*_: Any) -> None:
            self._done += 1

        for part in module.modules():
            for layer in part if type(part).__name__ == "ModuleList" else ():
                layer.register_forward_pre_hook(passed)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(passed)

    def pulse(self) -> Pulse:
        """On another thread than that of the calls."""
        stack = tuple(frames_of(sys._current_frames().get(self.thread)))
        if not stack or any(map(self._grew, self._counts())):
            self._looks += 1
        return Pulse(self._done + self._looks, self._last, stack, self._joined(), self._on_gpu)

    def _counts(self) -> tuple[Callable[[], float], ...]:
        """Of seconds that show that a call computes. The first that does is enough, as the second reads many files:
        beside a thread that computes in Python each of them waits for its turn."""
        return (children_cpu,) if self._on_gpu else (self._own_cpu, children_cpu)

    def _grew(self, count: Callable[[], float]) -> bool:
        """Since it was last looked at, as where something computes."""
        now, computed = time.monotonic(), count()
        since, before = self._seen[count]
        self._seen[count] = now, computed
        return computed - before > MIN_CPU_SHARE * (now - since)

    def _own_cpu(self) -> float:
        """Seconds that the calls' thread ran or queued for a core."""
        try:
            ran, queued, _ = Path(f"/proc/self/task/{self.native_thread}/schedstat").read_text().split()
            return (int(ran) + int(queued)) / 1e9
        except OSError:  # not every kernel counts that
            return time.clock_gettime(time.pthread_getcpuclockid(self.thread))


def frames_of(frame: FrameType | None) -> Iterable[str]:
    """A thread's frames as faulthandler writes them, from this one out."""
    for _ in range(MAX_FRAMES_READ):
        if frame is None:
            return
        yield f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        frame = frame.f_back


class HangDetector:
    """Of one call. `limit_s`: for so long a rank may stand still or not answer; `first`: of its kind."""

    def __init__(self, limit_s: float, first: bool = False):
        self._limit_s, self._first = limit_s, first
        self._last: dict[int, Pulse] = {}
        self._still: dict[int, float] = {}
        self._silent: dict[int, float] = {}

    def check(self, seconds: float, pulses: Mapping[int, Pulse | None]) -> int | None:
        """The rank that hangs, if one does.

        `pulses`: of the ranks whose call has not ended, None of those that have not answered; `seconds`: since the look
        before. Of many only some count: the driver was not there.
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
        """Those of them that have stood still for so many times as long as they may."""
        return [rank for rank in ranks if rank in self._last and self._still[rank] >= times * self._limit(rank)]

    def is_waiting_for(self, rank: int, others: Iterable[int]) -> bool:
        """Whether it stands there for one of these."""
        own = self._last.get(rank)
        return own is not None and (
            own.is_waiting or any(own.is_ahead_of(self._last[other]) for other in others if other in self._last)
        )

    def describe_hang(self, rank: int) -> str:
        """What is known of a rank that hangs, as the rest of a sentence that begins with its name."""
        pulse, silent = self._last.get(rank), self._silent[rank] > 0
        limit = f"(cluster.heartbeat_s={self._limit_s:g})"
        if silent:
            state, stack_title = (
                f"has not answered for {self._silent[rank]:.1f} s {limit}",
                "Its stack at its last answer",
            )
        else:
            state, stack_title = f"has stood still for {self._still[rank]:.1f} s {limit}", "It stands in"
        if pulse is None:
            return state
        own = [frame for frame in pulse.stack[1:] if not LIBRARY.match(frame.split('"')[1])]
        stack = "".join(f"\n  {frame}" for frame in [*pulse.stack[:1], *own][:MAX_FRAMES_SHOWN])
        return f"{state}; the last that it did: {pulse.last}. {stack_title}, the innermost call first:{stack}"

    def _limit(self, rank: int) -> float:
        pulse = self._last.get(rank)
        return self._limit_s * (COLD_START_FACTOR if self._first and pulse and pulse.on_gpu else 1)

    def _collectives(self, rank: int) -> int:
        return sum(self._last[rank].joined.values())
