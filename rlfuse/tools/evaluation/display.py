"""Progress display of engine startup and generation: a bar, or lines if there is no terminal."""

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


def start_display(source: object) -> Display:
    """Print the first line and set up the process, before libraries read environment and temporary folder at import."""
    display = Display()
    display.say(f"rlfuse {__version__}: {source}")
    keep_temporary_files()
    keep_hangup_from_children()
    quiet_libraries()
    return display


class Display:
    """Display of starting parts, then of the number of finished responses."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.total = self.done = self.tokens = 0
        self._start = self._last_report = self._last = 0.0
        self._starting: list[str] = []
        self._is_live = is_live_terminal(self.console)
        self._status = self.console.status("")
        self._bars: Progress | None = None

    def say(self, text: str) -> None:
        print_line(self.console, text)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._starting.append(name)
        self._draw()
        try:
            with timed(name, self.say):
                yield
        finally:
            self._starting.remove(name)
            self._draw()

    def _draw(self) -> None:
        if self._is_live and self._starting:
            self._status.update(", ".join(self._starting))
            self._status.start()
        else:
            self._status.stop()

    async def report_starting(self) -> None:
        """Print the parts that are still starting at intervals, until cancelled. Only without a terminal."""
        while True:
            await asyncio.sleep(SILENT_S)
            if self._starting and not self._is_live:
                self.say(f"… still starting: {', '.join(self._starting)}")

    @contextmanager
    def generating(self, total: int, done: int) -> Iterator[None]:
        self.total, self.done = total, done
        self._start = self._last_report = self._last = time.monotonic()
        if not self._is_live:
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
        return self.tokens / max(self._last - self._start, 1e-9)

    def add(self, responses: int, tokens: int) -> None:
        self.done += responses
        self.tokens += tokens
        self._last = time.monotonic() if responses else self._last
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self.done, speed=self.speed)
        elif time.monotonic() - self._last_report > SILENT_S:
            self._last_report = time.monotonic()
            self.say(f"{self.done:,} of {self.total:,} responses, {self.speed:,.0f} tokens/s")
