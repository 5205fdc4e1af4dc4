"""Print keys for people: `rlfuse train --help` and the key reference conf/KEYS.md."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

from rlfuse.config.changes import Effect, rules
from rlfuse.config.documentation import Key, documented, groups
from rlfuse.config.valid_values import VALUES
from rlfuse.progress import Console

MARKDOWN = "--markdown"
COLUMNS = 100
REFERENCE = """\
# Keys

<!-- Written by `rlfuse train --help --markdown > conf/KEYS.md`, from the sources in rlfuse/config. -->

Every key of a job, as it is given on the command line (`rollout.n=8`) or in a job file. The last column is about runs
that go on from a checkpoint with another value. Such changes, by the word there:

{effects}"""


def print_help(words: list[str], out: TextIO | None = None) -> None:
    """The keys by group; `words` narrow it to keys that contain one of them (in name or text), `--markdown` is none."""
    out, markdown = out or sys.stdout, MARKDOWN in words
    words = [word for word in words if word != MARKDOWN]
    wanted = [key for key in documented() if not words or any(w in key.name or w in key.text.lower() for w in words)]
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
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=out, width=min(COLUMNS, shutil.get_terminal_size().columns), highlight=False)
    for group in dict.fromkeys(key.group for key in wanted):
        console.print(f"\n[bold]{group}[/bold]  {escape(groups()[group])}")
        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, expand=True)
        table.add_column(style="cyan", width=max(len(key.name) for key in documented()), overflow="fold")
        table.add_column(ratio=1)
        for key in (key for key in wanted if key.group == group):
            default = "[red]required[/red]" if key.required else escape(f"= {key.default_text}")
            limits = f"  [dim]({key.limits})[/dim]" if key.limits else ""
            table.add_row(key.name, f"[dim]{escape(key.type)}[/dim] {default}{limits}\n{escape(key.text)}")
        console.print(table)


def reference(wanted: list[Key] | tuple[Key, ...]) -> str:
    """The keys as a page of Markdown, with what a change of each means to a run that is resumed."""
    lines = [REFERENCE.format(effects="\n".join(f"- *{effect.label}*: {effect.value}." for effect in Effect))]
    for group in dict.fromkeys(key.group for key in wanted):
        lines += ["", f"## {group}", "", groups()[group], ""]
        inner = [name for name in groups() if name.startswith(f"{group}.")]
        lines += [f"- `{name}`: {groups()[name]}" for name in inner] + ([""] if inner else [])
        lines += ["| key | valid values | default | meaning | a change on resume |", "|---|---|---|---|---|"]
        lines += [_row(key) for key in wanted if key.group == group]
    return "\n".join(lines)


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{key.default_text}`"
    changes = ", or ".join(f"{effect.label} ({reason})" for effect, reason in rules(key.name.partition("[]")[0]))
    cells = (f"`{key.name}`", _valid(key), default, key.about.rstrip(":."), changes)
    return f"| {' | '.join(map(_escaped, cells))} |"


def _valid(key: Key) -> str:
    if key.name in VALUES:
        named = re.sub(r"(^|\| )([^ |]+)", r"\1`\2`", VALUES[key.name])
        return f"a list of {named}" if key.type.startswith("list") else named + " | `null`" * key.optional
    kind = f"`{key.type.removesuffix(' | None')}`"
    return f"{kind}: {key.limits}" if key.limits else kind + (", or null" if key.optional else "")


def _escaped(cell: str) -> str:
    parts = cell.split("`")
    parts[::2] = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")
