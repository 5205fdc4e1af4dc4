"""List all keys with type, default, valid values and docstring, in the schema's order.

Source of `rlfuse train --help`, conf/KEYS.md and error messages. Docstrings of fields are read from the syntax trees of
the schema's files, since Python does not keep them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from omegaconf import MISSING

from rlfuse.config import rewards, run_groups, schema, video
from rlfuse.config.valid_values import RANGES, VALUES


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of a job."""

    name: str
    type: str
    default: Any = dataclasses.field(hash=False)  # lists and dictionaries are defaults too
    about: str

    @property
    def text(self) -> str:
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
        return self.type.startswith("dict")

    @property
    def default_text(self) -> str:
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
    return getattr(schema, str(field.type), getattr(rewards, str(field.type), None))


@functools.cache
def keys() -> tuple[Key, ...]:
    """All keys of a job, in the order of the schema."""
    return tuple(each for _, each in _walk(schema.Config, "") if isinstance(each, Key))


@functools.cache
def by_name() -> dict[str, Key]:
    """All keys by their full name."""
    return {key.name: key for key in keys()}


def documented() -> list[Key]:
    """All keys, and those of an entry of reward.functions behind it."""
    found: list[Key] = []
    for key in keys():
        found.append(key)
        if key.name == "reward.functions":
            found += [each for _, each in _walk(rewards.RewardEntry, "reward.functions[].")]
    return found


@functools.cache
def groups() -> dict[str, str]:
    """Every group (`actor`, `actor.optim`, ...) with its docstring, on one line."""
    found = ((name, each.__doc__) for name, each in _walk(schema.Config, "") if isinstance(each, type))
    return {name: " ".join((text or "").split()) for name, text in found}


@functools.cache
def _texts() -> dict[tuple[str, str], str]:
    return field_texts(schema, run_groups, rewards, video)


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


def _walk(node: type, prefix: str) -> Iterator[tuple[str, type | Key]]:
    for field in dataclasses.fields(node):
        name, nested = prefix + field.name, _group_class(field)
        if nested is not None:
            yield name, nested
            yield from _walk(nested, f"{name}.")
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            type_name = str(field.type).replace("dict[str, Any]", "dict").replace("list[Any]", "list")
            yield name, Key(name, type_name, default, _texts().get((node.__name__, field.name), ""))
