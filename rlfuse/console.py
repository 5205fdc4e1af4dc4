"""Output streams of commands: strip control characters and encode for the terminal.

Role: every command calls `prepare_streams` before it prints, and draws with `progress.Console`. Text from data, models
and run folders may contain escape sequences; only those of Rich reach the terminal. Characters that the encoding lacks
are replaced instead of raising UnicodeEncodeError. A closed terminal is not an error.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

ASCII = {"✓": "+", "…": "...", "·": "-", "→": "->", "±": "+-", "≥": ">=", "≤": "<=", "∞": "inf", "÷": "/"}
ASCII |= dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)) | {chr(code): "*" for code in range(0x2800, 0x2900)}
"""Replacements in messages, tables, curves and the spinner; other characters are escaped, as \\u4e2d."""


CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Escape sequences, control characters, and characters that reverse the direction of text."""


def plain(text: str) -> str:
    """Return `text` without control characters other than newlines and tabs."""
    return text if text.isprintable() else CONTROL.sub("", text.replace("\r", "\n"))


class _Stream:
    """A text stream that ignores writes to a closed terminal: SIGHUP follows and stops the run.

    A pipe without a reader (the notebook was restarted) gives no signal: the stream sends SIGHUP to a run that handles
    it, so that it stops with a checkpoint.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._is_terminal = stream, stream.isatty()

    def write(self, text: str) -> int:
        with self._may_be_closed():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._may_be_closed():
            self._stream.flush()

    @contextmanager
    def _may_be_closed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE and callable(signal.getsignal(signal.SIGHUP)):
                os.kill(os.getpid(), signal.SIGHUP)
            elif not self._is_terminal or error.errno != errno.EIO:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Plain(_Stream):
    """A stream that strips control characters, except a leading carriage return of a progress bar."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.rich_proxied_file = _Stream(stream)  # to which Rich writes directly

    def write(self, text: str) -> int:
        start = "\r" if text.startswith("\r") else ""
        super().write(start + plain(text.removeprefix(start)))
        return len(text)


def prepare_streams() -> None:
    """Make stdout and stderr strip control characters and replace what they cannot encode; workers write UTF-8."""
    codecs.register_error("ascii", _in_ascii)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):  # not in notebooks
            stream.reconfigure(errors="ascii")
        if not isinstance(stream, _Plain):
            setattr(sys, name, _Plain(stream))
    if codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8":
        os.environ["PYTHONIOENCODING"] = "utf-8"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace the first character that cannot be encoded (a codec error handler)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    return ASCII.get(character) or character.encode("ascii", "backslashreplace").decode(), error.start + 1
