"""The list of keys with type, default, valid values and docstring, read from the schema's source.

Role: one source for `rlfuse train --help`, for the key reference (conf/KEYS.md, `rlfuse train --help --markdown`), for
error messages that name a key's meaning, and for the check that README names only keys that exist. Python keeps no
docstring of a dataclass field, so the strings are taken from the syntax tree of schema.py. Invariant: keys come in the
schema's order, each leaf once. Imports nothing heavy.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TextIO

from omegaconf import MISSING

from rlfuse.config import alerting, clusters, rewards, schema, trainer
from rlfuse.config.valid_values import RANGES, VALUES

COLUMNS = 100
"""Widest help text; longer lines are tiring to read, and many terminals end here."""
MARKDOWN = "--markdown"
"""Among the words after --help: print the reference."""
REFERENCE = """\
# Keys

<!-- Written by `rlfuse train --help --markdown > conf/KEYS.md`, from the sources in rlfuse/config. -->

Every key of a job, as it is given on the command line (`rollout.n=8`) or in a job file. The last column is about runs
that go on from a checkpoint with another value. Such changes, by the word there:

{effects}"""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of a job."""

    name: str
    """Full dotted name, as it is typed on the command line."""
    type: str
    """As annotated in the schema: `int`, `list[str]`, `float | None`."""
    default: Any = dataclasses.field(hash=False)  # lists and dictionaries are defaults too
    about: str
    """What it does, as it stands below the field: before valid values, which have their own place, with a colon."""

    @property
    def text(self) -> str:
        """What it does, and which values with names it has."""
        return f"{self.about} {VALUES[self.name]}." if self.about.endswith(":") else self.about

    @property
    def group(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def leaf(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def required(self) -> bool:
        return isinstance(self.default, str) and self.default == MISSING

    @property
    def optional(self) -> bool:
        return self.type.endswith("| None")

    @property
    def limits(self) -> str:
        """The valid values of a number: `1 or more, or null`; empty for other keys."""
        words = RANGES.get(self.name, "")
        return f"{words}, or null" if words and self.optional else words

    @property
    def free(self) -> bool:
        """Keys below it are not listed here: anything goes."""
        return self.type.startswith("dict")

    @property
    def default_text(self) -> str:
        """The default as it would be typed in YAML."""
        return "required" if self.required else as_typed(self.default)


def as_typed(value: Any) -> str:
    """A value as it is typed in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_typed(item) for item in value) + "]"
    return str(value)


def _group_class(field: dataclasses.Field) -> type | None:
    """The class of a nested group, None for a key. Annotations are strings, so a group is known by its class's name."""
    return getattr(schema, str(field.type), getattr(rewards, str(field.type), None))


@functools.cache
def keys() -> tuple[Key, ...]:
    """All keys of a job, in the order of the schema."""
    return tuple(_walk(schema.Config, ""))


@functools.cache
def by_name() -> dict[str, Key]:
    """All keys by their full name."""
    return {key.name: key for key in keys()}


def _documented() -> list[Key]:
    """All keys, and those of an entry of reward.functions behind it."""
    found: list[Key] = []
    for key in keys():
        found.append(key)
        if key.name == "reward.functions":
            found += _walk(rewards.RewardEntry, "reward.functions[].")
    return found


@functools.cache
def groups() -> dict[str, str]:
    """Every group (`actor`, `actor.optim`, ...) with the first line of its docstring."""
    found: dict[str, str] = {}

    def visit(node: type, prefix: str) -> None:
        for field in dataclasses.fields(node):
            nested = _group_class(field)
            if nested is not None:
                found[prefix + field.name] = " ".join((nested.__doc__ or "").split())
                visit(nested, f"{prefix}{field.name}.")

    visit(schema.Config, "")
    return found


@functools.cache
def _texts() -> dict[tuple[str, str], str]:
    return field_texts(schema, alerting, clusters, rewards, trainer)


def field_texts(*modules: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the string below the field, of the dataclasses in these modules."""
    found: dict[tuple[str, str], str] = {}
    for node in (node for module in modules for node in ast.parse(inspect.getsource(module)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and documented and isinstance(below.value.value, str):
                found[node.name, field.target.id] = " ".join(below.value.value.split())
    return found


def _walk(node: type, prefix: str) -> list[Key]:
    found: list[Key] = []
    for field in dataclasses.fields(node):
        nested = _group_class(field)
        if nested is not None:
            found += _walk(nested, f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        type_name = str(field.type).replace("dict[str, Any]", "dict").replace("list[Any]", "list")
        text = _texts().get((node.__name__, field.name), "")
        found.append(Key(prefix + field.name, type_name, default, text))
    return found


def print_help(words: list[str], out: TextIO | None = None) -> None:
    """The keys by group; `words` narrow it to keys that contain one of them (in name or text), `--markdown` is none."""
    out, markdown = out or sys.stdout, MARKDOWN in words
    words = [word for word in words if word != MARKDOWN]
    wanted = [key for key in _documented() if not words or any(w in key.name or w in key.text.lower() for w in words)]
    if not wanted:
        print(f"No key is about {' or '.join(words)}. All keys: rlfuse train --help", file=out)
    elif markdown:
        print(reference(wanted), file=out)
    elif out.isatty():
        _print_rich(wanted, out)
    else:
        print(help_text(wanted), file=out)


def help_text(wanted: list[Key] | tuple[Key, ...]) -> str:
    """Plain help, at most `COLUMNS` wide."""
    lines: list[str] = []
    group = None
    for key in wanted:
        if key.group != group:
            group = key.group
            lines += ["", *textwrap.wrap(f"{group}: {groups()[group]}", COLUMNS, subsequent_indent="    ")]
        value, beside = (key.type, "required") if key.required else (f"{key.type} = {key.default_text}", key.limits)
        lines.append(f"  {key.name}: {value}{f'  ({beside})' if beside else ''}")
        lines += textwrap.wrap(
            key.text, COLUMNS, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False
        )
    return "\n".join(lines).lstrip("\n")


def _print_rich(wanted: list[Key], out: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=out, width=min(COLUMNS, shutil.get_terminal_size().columns), highlight=False)
    for group in dict.fromkeys(key.group for key in wanted):
        console.print(f"\n[bold]{group}[/bold]  {escape(groups()[group])}")
        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, expand=True)
        table.add_column(style="cyan", width=max(len(key.name) for key in _documented()), overflow="fold")
        table.add_column(ratio=1)
        for key in (key for key in wanted if key.group == group):
            default = "[red]required[/red]" if key.required else escape(f"= {key.default_text}")
            limits = f"  [dim]({key.limits})[/dim]" if key.limits else ""
            table.add_row(key.name, f"[dim]{escape(key.type)}[/dim] {default}{limits}\n{escape(key.text)}")
        console.print(table)


def reference(wanted: list[Key] | tuple[Key, ...]) -> str:
    """The keys as a page of Markdown, with what a change of each means to a run that is resumed."""
    from rlfuse.config.changes import Effect  # which reads the keys here

    lines = [REFERENCE.format(effects="\n".join(f"- *{effect.label}*: {effect.value}." for effect in Effect))]
    for group in dict.fromkeys(key.group for key in wanted):
        lines += ["", f"## {group}", "", groups()[group], ""]
        inner = [name for name in groups() if name.startswith(f"{group}.")]
        lines += [f"- `{name}`: {groups()[name]}" for name in inner] + ([""] if inner else [])
        lines += ["| key | valid values | default | meaning | a change on resume |", "|---|---|---|---|---|"]
        lines += [_row(key) for key in wanted if key.group == group]
    return "\n".join(lines)


def _row(key: Key) -> str:
    from rlfuse.config.changes import rules

    default = "required" if key.required else f"`{key.default_text}`"
    changes = ", or ".join(f"{effect.label} ({reason})" for effect, reason in rules(key.name.partition("[]")[0]))
    cells = (f"`{key.name}`", _valid(key), default, key.about.rstrip(":."), changes)
    return f"| {' | '.join(map(_escaped, cells))} |"


def _valid(key: Key) -> str:
    """The values that a key may have."""
    if key.name in VALUES:
        named = re.sub(r"(^|\| )([\w-]+)", r"\1`\2`", VALUES[key.name])
        return f"a list of {named}" if key.type.startswith("list") else named
    kind = f"`{key.type.removesuffix(' | None')}`"
    return f"{kind}: {key.limits}" if key.limits else kind + (", or null" if key.optional else "")


def _escaped(cell: str) -> str:
    """Without what Markdown takes for the end of a cell and, outside code, for a tag or emphasis."""
    parts = cell.split("`")
    parts[::2] = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")
