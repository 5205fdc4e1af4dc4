"""Everything that happened in a run: the spans of all processes, in its `events.jsonl`.

Role: the driver records into `recorder`, engines into their own, and at the end of a step the controller has them
collected. Waits for engines to hand their spans over.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlfuse.events import EventLog, Recorder, Span
from rlfuse.observe.faults import count_faults
from rlfuse.protocols import Recorded


class Journal:
    """Usable from the first line of a run; `engines` are those that stand."""

    def __init__(self, folder: Path, faults: Counter[str]):
        """`faults`: what was lost and replaced in the run's earlier attempts, counted on."""
        self.recorder, self.faults = Recorder("driver"), faults
        self.began = time.time()
        self.engines: Sequence[Recorded] = ()
        self.last_step = (0, 0)
        """Where the spans that were collected last stand in the file: bytes, from and to."""
        self._file = EventLog(folder / "events.jsonl")

    @property
    def path(self) -> Path:
        return self._file.path

    async def collect(self, step: int) -> list[Span]:
        """All spans since the last call, of every process; they are in the file."""
        spans = self.recorder.drain()
        for drained in await asyncio.gather(*(engine.drain() for engine in self.engines)):
            spans += drained
        for span in spans:
            span.step = step if span.step < 0 else span.step
        self.faults.update(count_faults(spans))
        before = self._file.size
        self._file.write(sorted(spans, key=lambda span: span.start))
        self.last_step = (before, self._file.size)
        return spans

    def sync(self) -> None:
        """What is written is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """The driver's last spans are written, too."""
        left = self.recorder.drain()
        self.faults.update(count_faults(left))
        try:
            self._file.write(left)
        finally:
            self._file.close()
