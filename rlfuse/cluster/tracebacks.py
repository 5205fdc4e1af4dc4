"""Shorten tracebacks of other processes to frames of custom code and the exception. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FRAME = re.compile(r'File "([^"]+)", line \d+(?:, in .*)?$')
RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Failure|Timeout)\b(?:: .*|:?$)")
LIBRARY = re.compile(r"(?!.*-packages/rlfuse/).*(site-packages|dist-packages|/lib/python3)|<")
"""Matches files that belong neither to the user nor to rlfuse."""
MAX_FRAMES = 4
LINES = 4
WIDEST = 1000


@dataclass(frozen=True, slots=True)
class Traceback:
    """Frames and error of one raised exception."""

    frames: tuple[str, ...]
    error: str

    @property
    def own(self) -> list[str]:
        """Return frames of custom code plus the innermost frame; without custom code, the innermost few frames."""
        *outer, innermost = self.frames
        shown = [frame for frame in outer if not LIBRARY.match(frame.split('"')[1])] or outer
        return [f"  {frame}" for frame in [*shown, innermost][-MAX_FRAMES:]]

    def short(self) -> str:
        return "\n".join([*self.own, self.error])


def found_in(text: str) -> Iterator[Traceback]:
    """Yield all tracebacks in a text, in order; other text is skipped."""
    lines, frames, position = [line.strip() for line in text.splitlines()], list[str](), 0
    while position < len(lines):
        line, position = lines[position], position + 1
        if line.startswith("Traceback (most recent call last)"):
            frames = []
        elif FRAME.match(line):
            code = lines[position] if position < len(lines) else ""
            has_code = code and not (FRAME.match(code) or RAISED.match(code) or set(code) <= set("^~ "))
            frames.append(f"{line}\n    {code}" if has_code else line)
        elif frames and RAISED.match(line):
            rest = []
            while position < len(lines) and len(rest) < LINES - 1 and lines[position]:
                if re.match(r"Traceback |==|\(|\[|During handling|The above exception", lines[position]):
                    break
                rest.append(lines[position])
                position += 1
            yield Traceback(tuple(frames), "\n".join([line, *rest])[:WIDEST])
            frames = []
