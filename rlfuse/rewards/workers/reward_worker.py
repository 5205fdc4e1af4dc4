"""Ray actor that runs reward functions or one model, so that a crash or hang costs one sample and not the run.

Methods are synchronous, so Ray runs them on the main thread and functions may use `signal.alarm` or `asyncio.run`.
Errors of custom code are returned, never raised. Allocations beyond `memory_mb` raise MemoryError in the function.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import cloudpickle

from rlfuse.cluster import watchdog
from rlfuse.cluster.child_processes import restore_child_signals
from rlfuse.cluster.garbage import GROWN_MIB, GarbageCollector
from rlfuse.cluster.host_memory import NO_MEMORY
from rlfuse.config.custom_errors import headline, user_traceback
from rlfuse.errors import RewardError
from rlfuse.events import Recorder, Span
from rlfuse.rewards.api.functions import RewardFunction, load_function
from rlfuse.rewards.api.items import Item, Outcome
from rlfuse.samples import RewardFailure

DEFAULT_MB, RETAINED_DIVISOR = 1024, 16
"""DEFAULT_MB: reference without `memory_mb`. A process that retains less than limit / RETAINED_DIVISOR is kept."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Picklable description from which another process loads a reward function."""

    name: str
    place: str | bytes
    kwargs: dict[str, Any]
    answer_only: bool


class RewardWorker:
    """Actor that loads the reward functions of a run and calls them by name."""

    def __init__(
        self,
        where: str,
        sources: Sequence[FunctionSource],
        timeout_s: float,
        memory_mb: int | None = None,
        family: str | None = None,
    ):
        watchdog.register(where)
        self._recorder = Recorder(where)
        grown = GROWN_MIB if memory_mb is None else min(GROWN_MIB, memory_mb // 4)
        self._garbage = GarbageCollector(self._recorder, grown_mib=grown, young=True)
        self._sources, self._timeout_s, self._memory_mb, self._family = sources, timeout_s, memory_mb, family
        self._functions: dict[str, RewardFunction] = {}
        restore_child_signals()

    def start(self) -> str | None:
        """Load all functions and start models. Return the error message if that failed, else None."""
        try:
            if self._family is not None:
                from rlfuse.video.models.base import register_custom_family

                register_custom_family(self._family)
            self._functions = {source.name: unpack(source) for source in self._sources}
            for function in self._functions.values():
                if function.start is not None:
                    function.start()
        except RewardError as error:
            return str(error)
        except BaseException as error:
            return f"{headline(error)}\n{user_traceback(error)}"
        self._memory = MemoryLimit(self._memory_mb)
        return None

    def score(self, name: str, items: Sequence[Item]) -> tuple[list[Outcome], bool, bool]:
        """Return (outcomes in item order, whether the function is async, whether the process is out of memory)."""
        function = self._functions[name]
        try:
            outcomes = function.score(items, self._timeout_s)
            return outcomes, function.is_async, not function.is_model and self._memory.is_exhausted(outcomes)
        finally:
            self._garbage.collect_if_grown()

    def collect(self) -> list[Span]:
        """Collect garbage. Return the spans of all collections since the last call."""
        self._garbage.collect()
        return self._recorder.drain()


class MemoryLimit:
    """Limit of private data (RLIMIT_DATA) of this process: `more_mb` MiB above the current size. Linux only."""

    def __init__(self, more_mb: int | None):
        self._start = _data_bytes()
        self._kept = 2**20 * (DEFAULT_MB if more_mb is None else more_mb) // RETAINED_DIVISOR
        if more_mb is not None:
            limit, (_, hard) = self._start + more_mb * 2**20, resource.getrlimit(resource.RLIMIT_DATA)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def is_exhausted(self, outcomes: Sequence[Outcome]) -> bool:
        """Return whether a sample failed because earlier calls still hold memory; a new process may score it."""
        failed = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
        if not any(NO_MEMORY.search(f"{each.message}\n{each.traceback}") for each in failed):
            return False
        gc.collect()
        return _data_bytes() - self._start > self._kept


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def pack(function: RewardFunction) -> FunctionSource:
    """Return the description from which another process loads the function."""
    place = function.source if isinstance(function.source, str) else cloudpickle.dumps(function.source)
    return FunctionSource(function.name, place, function.kwargs or function.factory_kwargs, function.answer_only)


def unpack(source: FunctionSource) -> RewardFunction:
    """Load the function that `pack` described, under the same name."""
    place = cloudpickle.loads(source.place) if isinstance(source.place, bytes) else source.place
    return replace(load_function(place, source.kwargs), name=source.name, answer_only=source.answer_only)
