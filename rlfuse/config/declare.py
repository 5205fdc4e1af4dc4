"""Declare configuration keys: `key(...)` has the default, the effect on resume and the valid values of a field.

The string below a field is its documentation. Checks, help, conf/KEYS.md, error messages and resume read `declared`.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

CUSTOM = "path/file.py:name"
"""The form of a custom function or class as the value of a key."""


class Effect(Enum):
    """Effect of a changed value on a run that resumes with it; the value completes "these changes ..."."""

    IMMEDIATE = "take effect at once and leave the training as it is"
    NEXT_STEP = "take effect from the next step on"
    EXPERIMENT = "take effect, but before and after are then no longer one experiment"
    FIXED = "can't change in a run"

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Resume:
    """Effect of a change on resume and the reason; `sometimes`: of the changes that `run.resume` decides by value."""

    effect: Effect
    reason: str
    sometimes: Resume | None = None


RUN_NAME = Resume(Effect.IMMEDIATE, "names the run folder")
RESUME_FROM = Resume(Effect.IMMEDIATE, "the checkpoint to resume from")
LOGGING = Resume(Effect.IMMEDIATE, "what is logged, and when alerts are raised")
SAVING = Resume(Effect.IMMEDIATE, "when to validate and to save")
RESOURCES = Resume(Effect.IMMEDIATE, "memory, processes and time limits")
TOLERANCE = Resume(Effect.IMMEDIATE, "error tolerance")
LENGTH = Resume(Effect.NEXT_STEP, "how long it trains")
OPTIMIZER = Resume(Effect.NEXT_STEP, "how large the optimizer's steps are")
LOSS_WEIGHTS = Resume(Effect.NEXT_STEP, "weights and bounds in the loss")
KL_CONTROL = Resume(Effect.NEXT_STEP, "the controller restarts from a new coefficient")
SCHEDULING = Resume(Effect.NEXT_STEP, "when and where work runs, never what is computed")
ROUNDING = Resume(Effect.NEXT_STEP, "the same numbers up to rounding")
PROMPTS = Resume(Effect.EXPERIMENT, "other prompts from the same number of batches on")
ORDER = Resume(Effect.EXPERIMENT, "another order: some prompts of this epoch repeat, others are skipped")
BATCH = Resume(Effect.EXPERIMENT, "another batch; the position in the data is counted in batches")
UPDATES = Resume(Effect.EXPERIMENT, "another number of updates per batch")
SAMPLING = Resume(Effect.EXPERIMENT, "responses are sampled differently")
VALIDATION = Resume(Effect.EXPERIMENT, "validation scores before and after can't be compared")
REWARD = Resume(Effect.EXPERIMENT, "another reward: values before and after can't be compared")
ADVANTAGE = Resume(Effect.EXPERIMENT, "another advantage")
LOSS = Resume(Effect.EXPERIMENT, "another loss")
FRAMES = Resume(Effect.EXPERIMENT, "the model sees other frames")
WEIGHTS = Resume(Effect.FIXED, "weights come from the checkpoint")
STORED = Resume(Effect.FIXED, "weights and optimizer state are stored this way")
TRAINED = Resume(Effect.FIXED, "what is trained, and with which engine")
LAYOUT = Resume(
    Effect.FIXED,
    "optimizer state is sharded this way",
    Resume(Effect.NEXT_STEP, "where work runs; the checkpoint can be loaded with this layout"),
)
ESTIMATOR = Resume(
    ADVANTAGE.effect, ADVANTAGE.reason, Resume(Effect.FIXED, "with or without a critic: the checkpoint has the other")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a job."""

    name: str
    type: str
    default: Any = dataclasses.field(hash=False)  # lists and dictionaries are defaults too
    doc: str
    resume: Resume
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    or_minus_one: bool = False
    choices: str = ""
    """`a | b (what b means)`; a list is checked entry by entry."""
    rejected: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Values that other trainers accept -> why they are not supported here."""
    custom: bool = False
    """Whether it may name a custom function or class, in the form `CUSTOM`."""
    remedy: str = ""
    """Replaces "the default is ..." in the message about a value out of range."""
    is_path: bool = False
    accepts_entry: bool = False
    """Whether the list may be given as its only entry, without brackets."""

    @property
    def text(self) -> str:
        return f"{self.doc.rstrip('.')}: {self.values}." if self.choices else self.doc

    @property
    def names(self) -> tuple[str, ...]:
        """The values of `choices` without their meanings."""
        return _names(self.choices)

    @property
    def values(self) -> str:
        """`choices`, followed by the form of a custom function where one is accepted."""
        return f"{self.choices} | {CUSTOM} (custom)" if self.custom and self.choices else self.choices

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
    def free(self) -> bool:
        """Whether it is a dictionary below which any name is accepted."""
        return self.type.startswith("dict")

    @property
    def default_text(self) -> str:
        return "required" if self.required else as_typed(self.default)

    @property
    def range(self) -> str:
        """The valid range of a number: `0 or more and 1 or less`; empty for other keys."""
        bounds = ((self.above, "above {:g}"), (self.at_least, "{:g} or more"), (self.at_most, "{:g} or less"))
        words = " and ".join(form.format(bound) for bound, form in bounds if bound is not None)
        return f"-1 or {words}" if self.or_minus_one else words

    @property
    def limits(self) -> str:
        """`range`, and null where that is accepted."""
        return f"{self.range}, or null" if self.range and self.optional else self.range

    def in_range(self, value: float) -> bool:
        """Return whether a value is in the valid range; True without one."""
        if self.above is self.at_least is self.at_most is None or (self.or_minus_one and value == -1):
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    def accepts(self, value: object) -> bool:
        """Return whether one value is among the choices, or names a custom function where that is accepted."""
        return value in self.names or (self.custom and names_function(value))


@functools.cache
def _names(choices: str) -> tuple[str, ...]:
    return tuple(each.partition(" (")[0] for each in choices.split(" | ")) if choices else ()


def key(default: Any, resume: Resume, **constraints: Any) -> Any:
    """Declare a key as a field of a group; `constraints` are fields of `Key`, from `unit` on."""
    declaration = {"resume": resume, **constraints}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.copy, default), metadata=declaration)
    return dataclasses.field(default=default, metadata=declaration)


@functools.cache
def declared(config: type, prefix: str = "") -> tuple[Key, ...]:
    """Return the keys of a group and of the groups in it, in order. TypeError for one without documentation."""
    return tuple(each for _, each in walk(config, prefix) if isinstance(each, Key))


def walk(config: type, prefix: str = "") -> Iterator[tuple[str, type | Key]]:
    """Yield each group and key by its full name, a group before what is in it."""
    texts = field_texts(config)
    for field in dataclasses.fields(config):
        name = prefix + field.name
        if not field.metadata:
            if not dataclasses.is_dataclass(field.default_factory):
                raise TypeError(f"{name} is no declared key; write it as key(default, effect on resume)")
            yield name, field.default_factory
            yield from walk(field.default_factory, f"{name}.")
            continue
        if field.name not in texts:
            raise TypeError(f"{name} has no documentation; add a string below the field")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        kind = str(field.type).replace("dict[str, Any]", "dict").replace("list[Any]", "list")
        yield name, Key(name=name, type=kind, default=default, doc=texts[field.name], **field.metadata)


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """Return field -> the string below it, from the source of a dataclass, since Python does not keep these."""
    found, source = {}, _classes(cls.__module__).get(cls.__name__)
    for field, below in itertools.pairwise(source.body if source else ()):
        text = getattr(below.value, "value", None) if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            found[field.target.id] = " ".join(text.split())
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def names_function(value: object) -> bool:
    """Return whether `value` has the form `CUSTOM`."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return file.endswith(".py") and name.isidentifier()


def as_typed(value: Any) -> str:
    """Return a value as it is typed in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_typed(item) for item in value) + "]"
    return str(value)
