"""What starts before the first step, and how long it took: a tick for each part.

Role: `part` is put around everything that takes seconds until a run steps: by `rlfuse.train` before there is a log,
later by `RunLog.part`. Waits for nothing; where it takes long a line says so now and then.
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
"""A log is not silent for longer while something is under way."""
QUIET_LIBRARIES = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Variables by which libraries, imported after they are set, keep their notes and bars to themselves."""


class Console(rich.console.Console):
    """A console that styles text, but shows no control character that the text itself has, and no link."""

    def __init__(self, *, file: TextIO | None = None, **options: Any):
        # The stream of now: a live view redirects sys.stdout to one of its own.
        super().__init__(file=file or getattr(sys.stdout, "rich_proxied_file", None), **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            text, style, control = segment
            if style and style.link:
                style = style.update_link(None)
            yield segment if control else Segment(text if text.isprintable() else CONTROL.sub("", text), style)


def quiet_libraries() -> None:
    """Before libraries are imported: what this process prints is its own. Whoever set a variable keeps it."""
    os.environ.update(QUIET_LIBRARIES | os.environ)
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)  # it says it found no GPU


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def is_live_terminal(console: Console) -> bool:
    """Whether somebody looks on, at a terminal that can draw over what it shows; nobody does at those of CI systems."""
    return console.is_terminal and not console.is_dumb_terminal and "CI" not in os.environ


def is_due(every: int, step: int, total: int) -> bool:
    """Whether something that happens every so many steps, and after the last, is due; 0 or less: never."""
    return every > 0 and (step == total or step % every == 0)


def done_line(name: str, seconds: float) -> str:
    """The line of what is done."""
    return f"✓ {name}  {seconds:.1f} s"


@contextmanager
def timed(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """A tick when the body has ended well."""
    began = time.monotonic()
    yield
    say(done_line(name, time.monotonic() - began))


@contextmanager
def part(name: str, quiet: bool = False) -> Iterator[None]:
    """As `timed`, where no live view is drawn yet: a spinner at a terminal, in logs a line every `SILENT_S`."""
    console, began, done = Console(quiet=quiet), time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SILENT_S):
            console.print(f"… {name}: {time.monotonic() - began:.0f} s so far", highlight=False, markup=False)

    looked_at, telling = is_live_terminal(console), threading.Thread(target=tell, daemon=True, name="progress")
    if not looked_at:
        telling.start()
    try:
        with console.status(name) if looked_at else nullcontext():
            yield
    finally:
        done.set()
        if not looked_at:
            telling.join()  # it may be in the middle of a line, and the last one is ours
    console.print(done_line(name, time.monotonic() - began), highlight=False, markup=False)
