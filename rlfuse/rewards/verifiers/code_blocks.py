"""Extract the Python solution from the fenced code blocks of a response, parsed as in CommonMark. Pure, linear time."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

_FENCE = re.compile(
    r"(?P<prefix>[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<ticks>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)"
)
_TRAILING_FENCE = re.compile(r"(?<!`)(?P<ticks>`{3,})[ \t]*(?P<info>\w+)[ \t]*$")
"""Opening fence after other text: `Code: ```python`."""
_LANGUAGE = re.compile(r"\{?[ \t]*\.?([\w+#.-]+)")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*")
_MARKDOWN = ("markdown", "md")
_STATEMENT = re.compile(
    r"^[ \t]*(?:(?:def|class|for|while|if|with|try)\b.*:|(?:import|from|return)\b|[A-Za-z_]\w*[ \t]*[=(])", re.MULTILINE
)
"""Distinguishes code from output in a block without a language."""


@dataclass(slots=True)
class Block:
    """Fenced code block."""

    ticks: str
    prefix: str
    language: str
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """Content without the indentation of the fence."""
        text = "\n".join(self.lines)
        return textwrap.dedent(text) if text[:1] in (" ", "\t") else text

    def append(self, line: str) -> None:
        if quotes := self.prefix.count(">"):
            line = line[re.match(rf"(?:[ \t]*> ?){{0,{quotes}}}", line).end() :]
        margin = line[: _width(self.prefix)]
        self.lines.append(line[len(margin) - len(margin.lstrip(" \t")) :])

    def ends_at(self, fence: re.Match[str] | None) -> bool:
        """Return whether a fence closes the block: at least as long, and indented by at most 3 more characters."""
        return (
            fence is not None
            and fence["ticks"].startswith(self.ticks)
            and not fence["prefix"].strip(" \t>")
            and _width(fence["prefix"]) <= _width(self.prefix) + 3
        )


def solution(text: str, name: str | None = None, *, is_program: bool = True) -> str | None:
    """Return the code of an answer, or None if all blocks are in other languages.

    That is the last Python block, else the last block without a language; a text without blocks is code as a whole.
    Unless a program is expected, the last block that defines the function `name` (any function if None) takes
    precedence, because later blocks are usage examples.
    """
    outer = blocks(text)
    if not outer:
        return text
    found = [each for block in outer for each in (blocks(block.code) if block.language in _MARKDOWN else [block])]
    python = [block.code for block in found if _PYTHON.fullmatch(block.language)]
    plain = [block.code for block in found if not block.language]
    codes = python or [code for code in plain if _STATEMENT.search(code)] or plain
    known = rf"(?:def[ \t]+{re.escape(name)}\b|{re.escape(name)}[ \t]*=[^=])" if name else r"(?:def|class)\b"
    definition = re.compile(rf"^[ \t]*(?:async[ \t]+)?{known}", re.MULTILINE)
    defining = [] if is_program else [code for code in codes if definition.search(code)]
    return next(reversed(defining or codes), None)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text, in order; the last one may be unclosed."""
    found: list[Block] = []
    current: Block | None = None
    for line in text.split("\n"):
        line, fence = line.rstrip("\r"), _FENCE.fullmatch(line.rstrip())
        if current is None:
            current = _open_block(line, fence)
            found += [current] if current else []
        elif current.ends_at(fence):
            # Code does not contain opening fences, so the closing fence before this line is missing.
            current = _open_block(line, fence) if _LANGUAGE.match(fence["info"]) else None
            found += [current] if current else []
        elif (body := _before_fence(line, current.ticks)) is not None:
            current.append(body)
            current = None
        else:
            current.append(line)
    return found


def _open_block(line: str, fence: re.Match[str] | None) -> Block | None:
    if fence:
        language = _LANGUAGE.match(fence["info"])
        return Block(fence["ticks"], fence["prefix"], language[1].lower() if language else "")
    trailing = _TRAILING_FENCE.search(line)
    language = trailing["info"].lower() if trailing else ""
    is_opening = _PYTHON.fullmatch(language) and line[: trailing.start()].count("```") % 2 == 0
    return Block(trailing["ticks"], "", language) if is_opening else None


def _before_fence(line: str, ticks: str) -> str | None:
    body = (stripped := line.rstrip()).rstrip("`")
    is_end = ticks[0] == "`" and len(stripped) - len(body) >= len(ticks) and body.strip() and "```" not in body
    return body if is_end else None


def _width(prefix: str) -> int:
    return len(prefix.rpartition(">")[2].removeprefix(" ") if ">" in prefix else prefix)
