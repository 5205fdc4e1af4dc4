"""What commands print: without control characters, and in the encoding of the terminal.

Role: every command calls `prepare_streams` before it prints, and draws with `progress.Console`. Texts of data, models
and other people's folders may hold escape sequences, which a terminal obeys: only Rich's own reach it. Characters that
the encoding lacks are replaced, where Python's streams raise UnicodeEncodeError.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

ASCII = {"✓": "+", "…": "...", "·": "-", "→": "->", "±": "+-", "≥": ">=", "≤": "<=", "∞": "inf", "÷": "/"}
ASCII |= dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)) | {chr(code): "*" for code in range(0x2800, 0x2900)}
"""Of messages, tables, curves and the spinner; other characters are escaped, as \\u4e2d."""


CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Sequences that colour text or move the cursor, all other control characters, and those that turn text around."""


def plain(text: str) -> str:
    """Return `text` without control characters, but for ends of lines and tabs."""
    return text if text.isprintable() else CONTROL.sub("", text.replace("\r", "\n"))


class _Plain:
    """A text stream that shows no control character; a progress bar may return to the start of its line."""

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream  # to which Rich writes directly

    def write(self, text: str) -> int:
        start = "\r" if text.startswith("\r") else ""
        self.rich_proxied_file.write(start + plain(text.removeprefix(start)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def prepare_streams() -> None:
    """Have stdout and stderr show no control character, and in ASCII what their encoding lacks; workers write UTF-8."""
    codecs.register_error("ascii", _in_ascii)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="ascii")
        if not isinstance(stream, _Plain):
            setattr(sys, name, _Plain(stream))
    if codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8":
        os.environ["PYTHONIOENCODING"] = "utf-8"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace the first character that could not be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    return ASCII.get(character) or character.encode("ascii", "backslashreplace").decode(), error.start + 1
