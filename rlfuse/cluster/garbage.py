"""Collect garbage in all processes of a run at the same time, at a step's end (`trainer.gc_freq`; arXiv 2505.05713).

After its first planned collection a process turns Python's own off and freezes its objects; where custom code runs,
the young generations continue to be collected. vLLM's engine process is not included.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlfuse import clock
from rlfuse.cluster.host_memory import resident_mib
from rlfuse.events import Recorder, Span

GROWN_MIB = 256
"""Growth of resident memory since the largest value at a collection, above which garbage is collected."""
OBJECTS = 1_000_000
"""New containers since the last collection, above which garbage is collected; a scan takes some tenths of a second."""
NEVER = 1 << 30
"""Threshold of the third generation that Python never reaches."""
LOOK_S = 1.0

atexit.register(gc.unfreeze)  # otherwise nanobind reports frozen objects as leaks at exit


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries without collections, then freeze their objects."""
    automatic, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if automatic:
            gc.enable()
        if len(sys.modules) > before:
            gc.freeze()


class GarbageCollector:
    """Garbage collector of one process.

    held: returns MiB in use. grown_mib: allowed growth. young: leave the young generations to Python.
    """

    def __init__(
        self,
        recorder: Recorder,
        held: Callable[[], int] = resident_mib,
        grown_mib: int = GROWN_MIB,
        young: bool = False,
    ):
        self.planned = False
        self._recorder, self._held, self._grown_mib, self._young = recorder, held, grown_mib, young
        self._thresholds = gc.get_threshold()
        self._cause, self._grown = "python", {}
        self._began, self._looked, self._automatic, self._most_mib = 0.0, 0.0, 0, 0
        gc.callbacks.append(self._note)
        recorder.listeners.append(self._ended)

    def collect(self, cause: str = "step") -> None:
        """Collect now, and disable automatic collections except those that bound memory."""
        self._cause = cause
        try:
            gc.collect()
        finally:
            self._cause, self._grown = "python", {}
        if self._young:
            gc.set_threshold(*self._thresholds[:2], NEVER)
        else:
            gc.disable()
        if not self.planned:
            gc.freeze()
            self.planned = True
        self._most_mib = max(self._most_mib, self._held())

    def freeze(self) -> None:
        """Exclude all current objects from collections; scanning those of libraries takes half a second each time."""
        gc.freeze()

    def collect_frozen(self) -> None:
        """Collect all objects, including frozen ones."""
        if self.planned:
            gc.unfreeze()
        gc.collect()
        if self.planned:
            gc.freeze()

    def collect_if_grown(self) -> None:
        """Collect if memory or the number of objects has grown beyond its limit."""
        now = time.monotonic()
        if not self.planned or now - self._looked < LOOK_S:
            return
        self._looked = now
        mib, objects = self._held() - self._most_mib, gc.get_count()[0]
        if mib > self._grown_mib or objects > OBJECTS:
            self._grown = {"grown_mib": mib, "objects": objects}
            self.collect("memory")

    def close(self) -> None:
        """Restore Python's automatic collections, for a process that outlives its run."""
        gc.callbacks.remove(self._note)
        self._recorder.listeners.remove(self._ended)
        gc.unfreeze()
        if self.planned:
            self.planned = False
            gc.set_threshold(*self._thresholds)
            gc.enable()

    def _ended(self, event: str) -> None:
        if event.startswith("ended"):
            self.collect_if_grown()

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = clock.now()
            return
        planned = self._cause != "python"
        if planned or info["generation"] == 2:
            facts = {"collected": info["collected"], "automatic": self._automatic, **self._grown}
            span = Span("gc", self._recorder.where, self._began, clock.now(), cause=self._cause, attributes=facts)
            self._recorder.add(span)
        self._automatic = 0 if planned else self._automatic + 1
