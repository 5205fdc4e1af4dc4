"""Collect the spans of all processes at the end of a step into `events.jsonl`, and count faults for `fault/*`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlfuse import clock
from rlfuse.cluster.garbage import GarbageCollector
from rlfuse.events import EventLog, Recorder, Span
from rlfuse.protocols import Recorded

SEND_WAIT_S = 0.005
"""Wait until calls to other processes are sent."""


class Journal:
    """Spans and faults of a run. Usable from the start of a run; `attach` adds the engines once they exist."""

    def __init__(
        self, folder: Path, faults: Counter[str], gc_freq: int = 0, check_folder: Callable[[], None] = lambda: None
    ):
        """Open `events.jsonl`. `faults`: counts of earlier attempts. `check_folder` raises if the folder is lost."""
        self._check_folder = check_folder
        self.recorder, self.faults = Recorder("driver"), faults
        self._garbage: GarbageCollector | None = None
        self._gc_freq, self._due = gc_freq, gc_freq > 0
        self.began = clock.now()
        self._engines: Sequence[Recorded] = ()
        self.last_step = (0, 0)
        """Range of the last collected spans in the file: first and last byte."""
        self._file = EventLog(folder / "events.jsonl")

    @property
    def path(self) -> Path:
        return self._file.path

    def attach(self, engines: Sequence[Recorded]) -> None:
        """Add the engines, and exclude all objects of the driver so far from garbage collection."""
        self._engines, self._garbage = engines, GarbageCollector(self.recorder)
        if self._gc_freq:
            self._garbage.collect("start")

    async def collect(self, step: int) -> list[Span]:
        """Collect and write all spans since the last call; processes collect garbage if it is due."""
        self._check_folder()
        due, self._due = self._due or (self._gc_freq > 0 and step % self._gc_freq == 0), False
        *others, _ = await asyncio.gather(*(engine.drain(due) for engine in self._engines), self._collect_own(due))
        spans = self.recorder.drain()
        for drained in others:
            spans += drained
        for span in spans:
            span.step = step if span.step < 0 else span.step
        self.faults.update(count_faults(spans))
        await asyncio.to_thread(self._file.rotate)
        before = self._file.size
        self._file.write(sorted(spans, key=lambda span: span.start))
        self.last_step = (before, self._file.size)
        return spans

    async def _collect_own(self, due: bool) -> None:
        if due and self._garbage is not None:
            await asyncio.sleep(SEND_WAIT_S)
            self._garbage.collect()

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        """Write the last spans of the driver and close the file."""
        if self._garbage is not None:
            self._garbage.close()
        left = self.recorder.drain()
        self.faults.update(count_faults(left))
        try:
            self._file.write(left)
        finally:
            self._file.close()


REPLACED = {
    "rollout": "engines_replaced",
    "reward": "reward_workers_replaced",
    "encoder": "encoder_ranks_replaced",
    "driver": "restarts",
}


def count_faults(spans: Iterable[Span]) -> Counter[str]:
    """Return counts of lost and replaced processes, `restarts` and `{actor,critic,reward_model}_steps_skipped`."""
    counts: Counter[str] = Counter()
    for span in spans:
        if span.kind == "lost":
            counts["engines_lost"] += 1
            counts["samples_reissued"] += len(span.samples)
        elif span.kind == "restart" and "error" not in span.attributes:
            counts[REPLACED[span.where.partition("/")[0]]] += 1
        elif span.kind == "optimizer" and span.attributes.get("skipped") and span.where == "trainer/0":
            counts[f"{span.attributes['model']}_steps_skipped"] += 1
    return +counts


def fault_metrics(counts: Counter[str]) -> dict[str, float]:
    """Return the metrics fault/*, totals since the start of the run."""
    return {f"fault/{name}": float(count) for name, count in counts.items()}
