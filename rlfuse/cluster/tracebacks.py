"""Shorten tracebacks of other processes to frames of custom code and the exception. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FRAME = re.compile(r'File "([^"]+)", line \d+(?:, in .*)?$')
RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Failure|Timeout)\b(?:: .*|:?$)")
LIBRARY = re.compile(r"(?!.*-packages/rlfuse/).*(site-packages|dist-packages|/lib/python3)|<")
"""Matches the files of other code than a user's or ours."""
MAX_FRAMES = 4
LINES = 4
WIDEST = 1000


@dataclass(frozen=True, slots=True)
class Traceback:
    """One exception that was raised."""

    frames: tuple[str, ...]
    error: str

    @property
    def own(self) -> list[str]:
        """The frames of code that isn't a library's, and the innermost one whosever it is; else the innermost few."""
        *outer, innermost = self.frames
        shown = [frame for frame in outer if not LIBRARY.match(frame.split('"')[1])] or outer
        return [f"  {frame}" for frame in [*shown, innermost][-MAX_FRAMES:]]

    def short(self) -> str:
        return "\n".join([*self.own, self.error])


def found_in(text: str) -> Iterator[Traceback]:
    """Every traceback of the text, in its order; text before frames and between them is passed over."""
    lines, frames, position = [line.strip() for line in text.splitlines()], list[str](), 0
    while position < len(lines):
        line, position = lines[position], position + 1
        if line.startswith("Traceback (most recent call last)"):
            frames = []
        elif FRAME.match(line):
            code = lines[position] if position < len(lines) else ""
            told = code and not (FRAME.match(code) or RAISED.match(code) or set(code) <= set("^~ "))
            frames.append(f"{line}\n    {code}" if told else line)
        elif frames and RAISED.match(line):
            rest = []
            while position < len(lines) and len(rest) < LINES - 1 and lines[position]:
                if re.match(r"Traceback |==|\(|\[|During handling|The above exception", lines[position]):
                    break
                rest.append(lines[position])
                position += 1
            yield Traceback(tuple(frames), "\n".join([line, *rest])[:WIDEST])
            frames = []
