"""Explain unknown setting names, suggesting the intended key, and values of the wrong type. Pure.

Runs before Hydra, which accepts `+new.key=1` on a typed group and suggests nothing for an unknown name.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import Key, as_typed
from rlfuse.config.documentation import by_name, groups, keys
from rlfuse.config.other_frameworks import (
    VERL_PREFIXES,
    VERL_ROOT,
    Counterpart,
    counterpart,
    key_for_verl_name,
    other_meanings,
)
from rlfuse.config.schema import Config

DEFAULT_PRESETS = {"algorithm": "ppo", "fusion": "adaptive", "experiment": "null"}
PRESET_GROUPS = tuple(DEFAULT_PRESETS)
ALL_KEYS = "`rlfuse train --help` lists every key"


@dataclass(frozen=True, slots=True)
class Override:
    """A parsed `key=value` argument."""

    sign: str
    name: str
    value: str | None


def parse_override(text: str) -> Override:
    """Parse `+a.b=c` to Override("+", "a.b", "c"). Never fails; `explain_override` reports invalid names."""
    text = text.strip()
    sign = re.match(r"\+{0,2}|~", text)[0] or ("~" if text.startswith("~") else "")
    name, equals, value = text[len(sign) :].partition("=")
    return Override(sign, name.strip(), value if equals else None)


def is_free(name: str) -> bool:
    """Return whether a name is in a free dictionary, which accepts any key: rollout.engine_kwargs.enforce_eager."""
    return any(key.free and name.startswith(key.name + ".") for key in keys())


def explain_override(text: str) -> str | None:
    """Return one line that explains an invalid `key=value` argument, or None if it is valid."""
    override = parse_override(text)
    name, sign, value = override.name, override.sign, override.value
    if re.match(r"hydra\.sweeper\.params($|\.)", name):
        return f"{text}: write swept values as KEY=VALUE,VALUE with --multirun, or as `params` in a job file"
    if re.match(r"hydra([./]|$)", name):
        return None
    if sign == "~":
        return _explain_removal(name)
    if value is None:
        return _explain_bare(name)
    if name in PRESET_GROUPS:
        return _explain_preset(name, value)
    if is_free(name):
        return None
    if name in by_name():
        return f"+{name}: the key exists; write it without the plus: {name}={value}" if sign == "+" else None
    return explain_name(name, value, sign)


def _explain_preset(group: str, value: str) -> str | None:
    if value.startswith("["):
        names = value.strip("[]").replace(" ", "")
        return f"{group}={value}: a job has one preset per group; for one job each, write {group}={names} --multirun"
    if "null" in value.split(",") and (group, value) != ("experiment", "null"):
        return f"{group}={value}: null is not a preset; remove it, the default is {group}={DEFAULT_PRESETS[group]}"
    return None


def _explain_removal(name: str) -> str | None:
    if is_free(name):
        return None
    if name in PRESET_GROUPS:
        instead = f"write {name}={DEFAULT_PRESETS[name]}"
    elif name in by_name():
        key = by_name()[name]
        instead = "give it a value" if key.required else f"write its default, {name}={key.default_text}"
    else:
        return (
            explain_name(name, None, "~") or f"~{name}: is a group of keys, which can't be removed; omit the argument"
        )
    return f"~{name}: keys can't be removed; omit the argument, or {instead}"


def _explain_bare(name: str) -> str:
    if name in by_name() or is_free(name):
        return f"{name}: has no value; write {name}=VALUE"
    wrong = None if name in groups() else explain_name(name, None)
    if wrong is None or "." not in name:
        forms = "KEY=VALUE (rollout.n=8), presets GROUP=NAME (experiment=quickstart), job files by path (my_job.yaml)"
        return f"{name}: is not a setting; write {forms}"
    return wrong


def explain_name(name: str, value: str | None, sign: str = "") -> str | None:
    """Return one line that explains an unknown name; None for a key, a group, or a name in a free dictionary."""
    if name in by_name() or is_free(name):
        return None
    shown = f"{sign}{name}" + (f"={value}" if value is not None else "")
    if name in groups():
        if value is None or value.lstrip().startswith("{"):
            return None
        inside = [key.name for key in keys() if key.name.startswith(name + ".")]
        return f"{shown}: `{name}` is a group; set one of its keys: {', '.join(inside) or 'it has none'}"
    found = counterpart(name, frozenset(by_name()))
    if found is not None and not found.keys:
        return f"{shown}: is a setting of {found.origin} without a counterpart in rlfuse: {found.note}"
    if found is not None:
        note = f" ({found.note})" if found.note else ""
        return f"{shown}: is a name of {found.origin}; use `{found.keys[0]}`{note}{_write(found.keys[0], value, found)}"
    for prefix, ours in VERL_PREFIXES:
        if name.startswith(prefix) and prefix.startswith(VERL_ROOT):
            same_group = [key for key in nearest(ours + name.removeprefix(prefix)) if key.name.startswith(ours)]
            near = _suggest(same_group) if same_group else ALL_KEYS
            return f"{shown}: is a setting of verl without a counterpart in rlfuse; {near}"
    refused = "`+` adds keys only below free dictionaries such as rollout.engine_kwargs" if sign[:1] == "+" else ""
    refused += ", and presets from the folders in --config-dir; " if refused else ""
    return f"{shown}: unknown key; {refused}{_suggest(nearest(name))}"


def _write(key: str, value: str | None, found: Counterpart) -> str:
    return "" if value is None or found.note else f"; write {key}={found.values.get(value, value)}"


def _suggest(near: list[Key]) -> str:
    if not near:
        return f"no key has a similar name. Groups: {', '.join(g for g in groups() if '.' not in g)}; {ALL_KEYS}"
    described = [f"{key.name} ({key.text.rstrip('.')})" for key in near]
    return f"did you mean {' or '.join(described)}? {ALL_KEYS}"


def nearest(name: str) -> list[Key]:
    """Return up to three keys similar to `name`, best first."""
    leaf = name.rsplit(".", 1)[-1]
    group = name.split(".", 1)[0] if "." in name else ""
    same_leaf = [key for key in keys() if key.leaf == leaf]
    if not same_leaf and (other := counterpart(leaf, frozenset(by_name()))) is not None and other.keys:
        leaf = by_name()[other.keys[0]].leaf  # another framework's leaf in a group of rlfuse: actor.optim.learning_rate
        same_leaf = [key for key in keys() if key.leaf == leaf]
    if same_leaf:
        misspelt = difflib.get_close_matches(name, list(by_name()), n=1, cutoff=0.85)
        elsewhere = dict.fromkeys([*(by_name()[each] for each in misspelt), *same_leaf])
        return [key for key in same_leaf if key.group == group] or list(elsewhere)[:3]
    close_leaves = difflib.get_close_matches(leaf, {key.leaf for key in keys()}, n=3, cutoff=0.75)
    candidates = [key for wanted in close_leaves for key in keys() if key.leaf == wanted]
    likeness = {key: difflib.SequenceMatcher(None, name, key.name).ratio() for key in candidates if key.group == group}
    if likeness:
        return [key for key in likeness if likeness[key] == max(likeness.values())]
    close_names = difflib.get_close_matches(name, list(by_name()), n=2, cutoff=0.72)
    candidates += [by_name()[wanted] for wanted in close_names]
    return list(dict.fromkeys(candidates))[:3]


@dataclass(frozen=True, slots=True)
class Renames:
    """Settings with names of verl, and the keys they are renamed to."""

    names: dict[str, str]
    """Given name -> key, for settings of which only the name differs."""
    notes: dict[str, str]
    problems: dict[str, str]
    """Given name -> conflict with another setting."""


def rename(given: Mapping[str, str | None]) -> Renames:
    """Find settings (name -> value as typed) whose verl name has the same meaning as a key."""
    known = frozenset(by_name())
    typed = {name: value for name, value in given.items() if value is not None}
    names = {name: key for name, value in typed.items() if (key := key_for_verl_name(name, value, known)) is not None}
    notes = {name: f"{name}={typed[name]} -> {key}={typed[name]}" for name, key in names.items()}
    problems: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, value in typed.items():
        other = first.setdefault(names.get(name, name), name)
        if other != name and _plain(typed[other]) != _plain(value):
            key = names.get(name, name)
            problems[name] = f"{name}={value}: {other}={typed[other]} sets {key} to another value; remove one of them"
    return Renames(names, notes | other_meanings(typed, known), problems)


def _plain(value: str) -> str:
    return re.sub(r"[\s'\"]", "", value).lower()


REFERENCE = re.compile(r"\$\{[^${}:]+\}")
"""A reference to another key, which may be a list; an expression with more than a reference is a string."""
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}
CLASSES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}
LARGEST = 2**63
DEEPEST = 32


def fits(value: Any, type_name: str) -> bool:
    """Return whether a value has a type of the schema: `float | None`, `list[str]`, `dict[str, float]`."""
    if value is None:
        return type_name.endswith("| None")
    kind, _, inner = type_name.removesuffix(" | None").partition("[")
    if kind in ("list", "dict"):
        of = inner.removesuffix("]").removeprefix("str, ")
        entries = value.values() if isinstance(value, dict) else value
        return isinstance(value, {"list": list, "dict": dict}[kind]) and all(fits(each, of) for each in entries if of)
    return isinstance(value, CLASSES[kind]) and isinstance(value, bool) == (kind == "bool")


def explain_form(name: str, value: Any) -> str | None:
    """Return one line about a value that is invalid for every key (nested too deeply, integer too large), or None."""
    level, inside = 0, [value]
    while nodes := [node for node in inside if isinstance(node, dict | list)]:
        level += 1
        if level > DEEPEST:
            return f"{name}: brackets are nested more than {DEEPEST} levels deep; no setting needs four"
        inside = [each for node in nodes for each in (node.values() if isinstance(node, dict) else node)]
        if any(isinstance(each, int) and not -LARGEST <= each < LARGEST for each in inside):
            return _explain_size(name)
    return _explain_size(name) if isinstance(value, int) and not -LARGEST <= value < LARGEST else None


def _explain_size(name: str) -> str:
    remedy = f"; the default is {name}={by_name()[name].default_text}" if name in by_name() else ""
    return f"{name}: must be a 64-bit whole number, from {-LARGEST} to {LARGEST - 1}{remedy}"


def explain_value(name: str, value: str | None) -> str:
    """Return one line about a value of the wrong type for a key. `value`: None if unknown."""
    key = by_name()[name]
    base = key.type.removesuffix(" | None")
    null = " or null" if key.optional else ""
    remedy = f"give it as {name}=VALUE" if key.required else f"the default is {name}={key.default_text}"
    if base.startswith("list"):
        kind = "a list"
        has_brackets = value is None or value.startswith("[")
        remedy = f"check its entries, {key.type}" if has_brackets else f"write it in brackets: {name}=[{value}]"
    else:
        kind = KINDS.get(base, "a dictionary of options, {name: value}")
    shown = name if value is None else f"{name}={value}"
    return f"{shown}: needs {kind}{null}; {remedy} ({key.text.rstrip('.')})"


@functools.cache
def _typed_config() -> DictConfig:
    return OmegaConf.structured(Config)


def explain_type(name: str, value: Any) -> str | None:
    """Return one line about a value of the wrong type for a key; None if it is valid or the name is not a key."""
    if name not in by_name():
        return None
    try:
        OmegaConf.update(_typed_config(), name, as_list_entry(name, value))
    except (OmegaConfBaseException, ValueError):
        return explain_value(name, as_typed(value))
    return None


def accepts_entry(name: str) -> bool:
    """Return whether a list with one entry may be written without brackets."""
    return name in by_name() and by_name()[name].accepts_entry


def as_list_entry(name: str, value: Any) -> Any:
    """Return `value`, wrapped in a list if the key accepts a single entry: data.train_files=x.parquet, as in verl."""
    alone = accepts_entry(name) and isinstance(value, str | dict) and not REFERENCE.fullmatch(str(value))
    return [value] if alone else value
