"""Progress of startup: a line with the duration for each completed part.

Role: `part` wraps everything that takes seconds before the first step: used by `rlfuse.application` until there is a
log, then by `RunLog.part`. Waits for nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import rich.console
from rich.segment import Segment

from rlfuse.console import CONTROL

SILENT_S = 30.0
"""Maximum seconds without a line in the log while work is in progress."""
QUIET_LIBRARIES = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Environment variables that silence notes and progress bars of libraries imported afterwards."""


class Console(rich.console.Console):
    """A Rich console that strips control characters and links from text."""

    def __init__(self, *, file: TextIO | None = None, **options: Any):
        # The current stream: a live view redirects sys.stdout.
        super().__init__(file=file or getattr(sys.stdout, "rich_proxied_file", None), **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            text, style, control = segment
            if style and style.link:
                style = style.update_link(None)
            yield segment if control else Segment(text if text.isprintable() else CONTROL.sub("", text), style)


def quiet_libraries() -> None:
    """Silence libraries that are imported later. Variables set by the user are kept."""
    os.environ.update(QUIET_LIBRARIES | os.environ)
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)  # no GPU


def print_line(console: Console, text: str) -> None:
    """Print a line without markup and wrapping."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def is_live_terminal(console: Console) -> bool:
    """Return whether the console is an interactive terminal that can redraw lines, outside of CI systems."""
    return console.is_terminal and not console.is_dumb_terminal and "CI" not in os.environ


def is_due(every: int, step: int, total: int) -> bool:
    """Return whether an action of every `every` steps, and after the last, is due; `every` <= 0: never."""
    return every > 0 and (step == total or step % every == 0)


def done_line(name: str, seconds: float) -> str:
    """Return the line for a completed part."""
    return f"✓ {name}  {seconds:.1f} s"


@contextmanager
def timed(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Print a line when the body completes."""
    began = time.monotonic()
    yield
    say(done_line(name, time.monotonic() - began))


@contextmanager
def part(name: str, quiet: bool = False) -> Iterator[None]:
    """Like `timed`, before there is a live view: a spinner on terminals, in logs a line every `SILENT_S`."""
    console, began, done = Console(quiet=quiet), time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(SILENT_S):
            console.print(f"… {name}: {time.monotonic() - began:.0f} s so far", highlight=False, markup=False)

    live, reporter = is_live_terminal(console), threading.Thread(target=report, daemon=True, name="progress")
    if not live:
        reporter.start()
    try:
        with console.status(name) if live else nullcontext():
            yield
    finally:
        done.set()
        if not live:
            reporter.join()  # it may be printing a line
    console.print(done_line(name, time.monotonic() - began), highlight=False, markup=False)
