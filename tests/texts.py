"""Find the texts of the package in its source: docstrings, comments and messages.

`python tests/texts.py > jobs/messages.md` renews the list of messages, which is read as a whole to review them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlfuse"
DIRECTIVE = re.compile(r"#\s*(noqa|type:|pragma|ruff:|fmt:|!)")
WORD = re.compile(r"[A-Za-z']{2,}")
MIN_WORDS = 4
"""A string of fewer words is a name, a format or a pattern."""
HEADER = """\
# Messages

This page lists all messages, warnings and printed texts of the package, to review and to search them;
[troubleshooting](troubleshooting.md) explains those that need an explanation. `…` marks the parts that vary. The
help texts of the keys are in [KEYS.md](../conf/KEYS.md).

`python tests/texts.py > jobs/messages.md` renews it.
"""


def modules() -> list[Path]:
    """Return the modules of the package; `rlfuse/tasks` is a link to jobs/tasks."""
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "jobs/tasks").rglob("*.py")])


@lru_cache(maxsize=1)  # the current module
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(source)


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def function_docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of functions and methods except properties."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            names = {
                name.id if isinstance(name, ast.Name) else getattr(name, "attr", "") for name in node.decorator_list
            }
            if not names & {"property", "cached_property", "overload"}:
                yield text


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module; successive lines of comments are one."""
    lines: list[str] = []
    place = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        if lines and token.start != (place[0] + 1, place[1]):
            yield " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("# "))
        place = token.start
    if lines:
        yield " ".join(lines)


def names(source: str) -> Iterator[str]:
    """Yield the names that a module defines, as words: functions, classes, arguments and variables."""
    for node in ast.walk(parsed(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name.replace("_", " ")
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name.replace("_", " ")


def messages(source: str) -> Iterator[str]:
    """Yield the strings of at least MIN_WORDS words except docstrings, in order, with … for replacement fields."""
    tree = parsed(source)
    seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if id(node) not in seen and (text := _text(node)) is not None:
            seen.update(map(id, ast.walk(node)))
            if " " in text and len(WORD.findall(text)) >= MIN_WORDS:
                found.append((node.lineno, text))
    yield from (text for _, text in sorted(found, key=lambda each: each[0]))


def _text(node: ast.AST) -> str | None:
    """Return the text of a string, an f-string or a sum of them; None for any other expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "…" for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            texts = _text(left), _text(right)
            return None if texts == (None, None) else "".join(text or "…" for text in texts)
    return None


def message_list() -> str:
    """Return the page of all messages: one block for each package, one line for each message."""
    blocks: dict[str, list[str]] = {}
    for path in modules():
        lines = [f"    {' '.join(text.split())}" for text in messages(path.read_text())]
        if lines:
            package = path.parent.relative_to(ROOT).as_posix()
            blocks.setdefault(package, []).extend([path.name, *lines])
    return HEADER + "".join(
        f"\n## {name}\n\n```text\n" + "\n".join(lines) + "\n```\n" for name, lines in blocks.items()
    )


if __name__ == "__main__":
    print(message_list(), end="")
