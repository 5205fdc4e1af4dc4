"""List all keys of a job in the schema's order, and print them: `rlfuse train --help`, conf/KEYS.md."""

from __future__ import annotations

import functools
import re
import textwrap

from rlfuse.config.declare import Effect, Key, declared, walk
from rlfuse.config.rewards import RewardEntry
from rlfuse.config.schema import Config

MARKDOWN = "--markdown"
COLUMNS = 100
REFERENCE = """\
# Keys

<!-- Written by `rlfuse train --help --markdown > conf/KEYS.md`, from rlfuse/config. -->

All keys of a job, as written on the command line (`rollout.n=8`) or in a job file. The last column gives the effect of
a changed value when a run resumes. Changes with this effect:

{effects}"""


def keys() -> tuple[Key, ...]:
    """Return all keys of a job."""
    return declared(Config)


@functools.cache
def by_name() -> dict[str, Key]:
    """Return all keys by their full name."""
    return {key.name: key for key in keys()}


def documented() -> list[Key]:
    """Return all keys; the keys of an entry of reward.functions follow it."""
    entry = declared(RewardEntry, "reward.functions[].")
    return [each for key in keys() for each in (key, *(entry if key.name == "reward.functions" else ()))]


@functools.cache
def groups() -> dict[str, str]:
    """Return every group (`actor`, `actor.optim`, ...) with its docstring, on one line."""
    return {name: " ".join((each.__doc__ or "").split()) for name, each in walk(Config) if isinstance(each, type)}


def print_help(words: list[str]) -> None:
    """Print keys by group, as Markdown with `--markdown`. `words` select the keys whose name or text has one of
    them."""
    selected = [word for word in words if word != MARKDOWN]
    wanted = [
        key for key in documented() if not selected or any(w in key.name or w in key.text.lower() for w in selected)
    ]
    if not wanted:
        print(f"No key matches {' or '.join(selected)}. To list all keys: rlfuse train --help")
    else:
        print(reference(wanted) if MARKDOWN in words else help_text(wanted))


def help_text(wanted: list[Key] | tuple[Key, ...]) -> str:
    """Return the help as plain text, at most `COLUMNS` wide."""
    lines: list[str] = []
    group = None
    for key in wanted:
        if key.group != group:
            group = key.group
            lines += ["", *textwrap.wrap(f"{group}: {groups()[group]}", COLUMNS, subsequent_indent="    ")]
        value, note = ("", "required") if key.required else (f" = {key.default_text}", key.limits)
        lines.append(f"  {key.name}: {_type(key)}{value}{f'  ({note})' if note else ''}")
        lines += textwrap.wrap(
            key.text, COLUMNS, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False
        )
    return "\n".join(lines).lstrip("\n")


def _type(key: Key) -> str:
    return f"{key.type} ({key.unit})" if key.unit else key.type


def reference(wanted: list[Key] | tuple[Key, ...]) -> str:
    """Return the key reference in Markdown, including the effect of a change on resume."""
    lines = [REFERENCE.format(effects="\n".join(f"- *{effect.label}*: {effect.value}." for effect in Effect))]
    for group in dict.fromkeys(key.group for key in wanted):
        lines += ["", f"## {group}", "", groups()[group], ""]
        inner = [name for name in groups() if name.startswith(f"{group}.")]
        lines += [f"- `{name}`: {groups()[name]}" for name in inner] + ([""] if inner else [])
        lines += ["| key | valid values | default | meaning | change on resume |", "|---|---|---|---|---|"]
        lines += [_row(key) for key in wanted if key.group == group]
    return "\n".join(lines)


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{key.default_text}`"
    effects = [each for each in (key.resume, key.resume.sometimes) if each]
    changes = ", or ".join(f"{each.effect.label} ({each.reason})" for each in effects)
    cells = (f"`{key.name}`", _valid(key), default, key.doc.rstrip("."), changes)
    return f"| {' | '.join(map(_escaped, cells))} |"


def _valid(key: Key) -> str:
    if key.choices:
        named = re.sub(r"(^|\| )([^ |]+)", r"\1`\2`", key.values)
        return f"a list of {named}" if key.type.startswith("list") else named + " | `null`" * key.optional
    kind = f"`{key.type.removesuffix(' | None')}`{f' ({key.unit})' if key.unit else ''}"
    return f"{kind}: {key.limits}" if key.limits else kind + (", or null" if key.optional else "")


def _escaped(cell: str) -> str:
    parts = cell.split("`")
    parts[::2] = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")
