"""Show progress of engines and generation: a bar, or lines without a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlfuse import __version__
from rlfuse.cluster.child_processes import keep_hangup_from_children
from rlfuse.cluster.scratch import keep_temporary_files
from rlfuse.progress import SILENT_S, Console, is_live_terminal, print_line, quiet_libraries, timed


def begin(source: object) -> Display:
    """The first line, before libraries are imported, which remember what is set and where temporary files are."""
    display = Display()
    display.say(f"rlfuse {__version__}: {source}")
    keep_temporary_files()
    keep_hangup_from_children()
    quiet_libraries()
    return display


class Display:
    """Parts that start, then so many responses of so many."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.total = self.done = self.tokens = 0
        self._began = self._told = self._last = 0.0
        self._under_way: list[str] = []
        self._looked_at = is_live_terminal(self.console)
        self._status = self.console.status("")
        self._bars: Progress | None = None

    def say(self, text: str) -> None:
        print_line(self.console, text)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._under_way.append(name)
        self._draw()
        try:
            with timed(name, self.say):
                yield
        finally:
            self._under_way.remove(name)
            self._draw()

    def _draw(self) -> None:
        if self._looked_at and self._under_way:
            self._status.update(", ".join(self._under_way))
            self._status.start()
        else:
            self._status.stop()

    async def report_starting(self) -> None:
        """Say until cancelled what still starts, so that no log is silent."""
        while True:
            await asyncio.sleep(SILENT_S)
            if self._under_way and not self._looked_at:
                self.say(f"… still starting: {', '.join(self._under_way)}")

    @contextmanager
    def generating(self, total: int, done: int) -> Iterator[None]:
        self.total, self.done = total, done
        self._began = self._told = self._last = time.monotonic()
        if not self._looked_at:
            yield
            return
        speed, moving = TextColumn("{task.fields[speed]:,.0f} tokens/s"), (BarColumn(), MofNCompleteColumn())
        with Progress(
            TextColumn("responses"), *moving, speed, TimeRemainingColumn(), console=self.console
        ) as self._bars:
            self._bars.add_task("", total=total, completed=done, speed=0.0)
            yield
        self._bars = None

    @property
    def speed(self) -> float:
        return self.tokens / max(self._last - self._began, 1e-9)

    def add(self, responses: int, tokens: int) -> None:
        self.done += responses
        self.tokens += tokens
        self._last = time.monotonic() if responses else self._last
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self.done, speed=self.speed)
        elif time.monotonic() - self._told > SILENT_S:
            self._told = time.monotonic()
            self.say(f"{self.done:,} of {self.total:,} responses, {self.speed:,.0f} tokens/s")
