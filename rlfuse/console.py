"""Text on consoles that can't show all of it: `✓` where stdout is ASCII, file names that are no UTF-8.

Role: every command calls `write_any_text` before it prints. Python's streams raise UnicodeEncodeError for such text.
"""

from __future__ import annotations

import codecs
import os
import sys

ASCII = {"✓": "+", "…": "...", "·": "-", "→": "->", "±": "+-", "≥": ">=", "≤": "<=", "∞": "inf", "÷": "/"}
ASCII |= dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)) | {chr(code): "*" for code in range(0x2800, 0x2900)}
"""Of messages, tables, curves and the spinner; other characters are escaped, as \\u4e2d."""


def write_any_text() -> None:
    """Have stdout and stderr write what their encoding lacks in ASCII; worker processes write UTF-8."""
    codecs.register_error("ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="ascii")
    if codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8":
        os.environ["PYTHONIOENCODING"] = "utf-8"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace the first character that could not be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    return ASCII.get(character) or character.encode("ascii", "backslashreplace").decode(), error.start + 1
