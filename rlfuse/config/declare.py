"""Declare configuration keys: `key(...)` has the default, the effect on resume and the valid values of a field.

The string below a field is its help text. Checks, help, conf/KEYS.md, error messages and resume read `declared`.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

CUSTOM = "path/file.py:name"
"""Syntax of a custom function or class as the value of a key."""
ASSIGNED = "_assigned"


class Effect(Enum):
    """Effect of a changed setting on a resumed run; the value completes "these changes ..."."""

    IMMEDIATE = "take effect immediately and do not affect training"
    NEXT_STEP = "take effect from the next step"
    EXPERIMENT = "take effect, but results before and after are not comparable"
    FIXED = "can't be changed in a run"

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


class KeyGroup:
    """Base class of the groups of keys. `assigned` has the fields that were set after an object was created."""

    if not TYPE_CHECKING:  # type checkers would permit any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name in vars(self):
                vars(self)[ASSIGNED] = {*assigned(self), name}
            object.__setattr__(self, name, value)


def assigned(group: KeyGroup) -> set[str]:
    """Return the fields of a group that were set after its creation, even to their defaults."""
    return vars(group).get(ASSIGNED, set())


@dataclass(frozen=True, slots=True)
class Resume:
    """Effect of a change on resume, with the reason. `sometimes`: the alternative, which `run.resume` selects by
    value."""

    effect: Effect
    reason: str
    sometimes: Resume | None = None


RUN_NAME = Resume(Effect.IMMEDIATE, "names the run folder")
RESUME_FROM = Resume(Effect.IMMEDIATE, "the checkpoint to resume from")
LOGGING = Resume(Effect.IMMEDIATE, "logging and alerts")
SAVING = Resume(Effect.IMMEDIATE, "validation and checkpoint intervals")
RESOURCES = Resume(Effect.IMMEDIATE, "memory, processes and time limits")
TOLERANCE = Resume(Effect.IMMEDIATE, "error tolerance")
LENGTH = Resume(Effect.NEXT_STEP, "length of the run")
OPTIMIZER = Resume(Effect.NEXT_STEP, "size of optimizer steps")
LOSS_WEIGHTS = Resume(Effect.NEXT_STEP, "coefficients and bounds in the loss")
KL_CONTROL = Resume(Effect.NEXT_STEP, "the KL controller restarts with a new coefficient")
SCHEDULING = Resume(Effect.NEXT_STEP, "when and where work runs, not its results")
ROUNDING = Resume(Effect.NEXT_STEP, "the same results up to rounding")
PROMPTS = Resume(Effect.EXPERIMENT, "different prompts after the same number of batches")
ORDER = Resume(Effect.EXPERIMENT, "data order: some prompts of this epoch repeat, others are skipped")
BATCH = Resume(Effect.EXPERIMENT, "batch composition; the position in the data is counted in batches")
UPDATES = Resume(Effect.EXPERIMENT, "number of updates per batch")
SAMPLING = Resume(Effect.EXPERIMENT, "sampling of responses")
VALIDATION = Resume(Effect.EXPERIMENT, "validation scores before and after are not comparable")
REWARD = Resume(Effect.EXPERIMENT, "rewards before and after are not comparable")
ADVANTAGE = Resume(Effect.EXPERIMENT, "advantage estimation")
LOSS = Resume(Effect.EXPERIMENT, "loss function")
FRAMES = Resume(Effect.EXPERIMENT, "the model receives different frames")
WEIGHTS = Resume(Effect.FIXED, "weights are loaded from the checkpoint")
STORED = Resume(Effect.FIXED, "weights and optimizer state are stored this way")
TRAINED = Resume(Effect.FIXED, "training task and rollout engine")
ESTIMATOR = Resume(
    ADVANTAGE.effect, ADVANTAGE.reason, Resume(Effect.FIXED, "adds or removes the critic, unlike the checkpoint")
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
    """`a | b (meaning of b)`; each entry of a list is checked."""
    rejected: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Value that other frameworks accept -> reason why it is not supported."""
    custom: bool = False
    """True if the value may name a custom function or class, in the form `CUSTOM`."""
    remedy: str = ""
    """Replaces "the default is ..." in the message for a value out of range."""
    is_path: bool = False
    accepts_entry: bool = False
    """True if a list with one entry may be written without brackets."""

    @property
    def text(self) -> str:
        return f"{self.doc.rstrip('.')}: {self.values}." if self.choices else self.doc

    @property
    def names(self) -> tuple[str, ...]:
        """Values of `choices`, without their explanations."""
        return _names(self.choices)

    @property
    def values(self) -> str:
        """`choices`, plus the syntax of custom functions if they are accepted."""
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
        """True for a dictionary that accepts any name."""
        return self.type.startswith("dict")

    @property
    def default_text(self) -> str:
        return "required" if self.required else as_typed(self.default)

    @property
    def range(self) -> str:
        """The valid range of a number: `0 or more and 1 or less`; empty for other keys."""
        bounds = ((self.above, "above {:g}"), (self.at_least, "{:g} or more"), (self.at_most, "{:g} or less"))
        words = " and ".join(form.format(bound) for bound, form in bounds if bound is not None)
        return f"-1, or {words}" if self.or_minus_one else words

    @property
    def limits(self) -> str:
        """`range`, plus null if it is accepted."""
        return f"{self.range}, or null" if self.range and self.optional else self.range

    def in_range(self, value: float) -> bool:
        """Return whether a value is in the valid range; True if the key has no range."""
        if self.above is self.at_least is self.at_most is None or (self.or_minus_one and value == -1):
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    def accepts(self, value: object) -> bool:
        """Return whether a value is one of the choices, or names a custom function if they are accepted."""
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
    """Return the keys of a group and its subgroups, in order. Raises TypeError for a key without help text."""
    return tuple(each for _, each in walk(config, prefix) if isinstance(each, Key))


def walk(config: type, prefix: str = "") -> Iterator[tuple[str, type | Key]]:
    """Yield each group and key with its full name, a group before its keys."""
    texts = field_texts(config)
    for field in dataclasses.fields(config):
        name = prefix + field.name
        if not field.metadata:
            if not dataclasses.is_dataclass(field.default_factory):
                raise TypeError(f"{name} is not a declared key; declare it as key(default, effect on resume)")
            yield name, field.default_factory
            yield from walk(field.default_factory, f"{name}.")
            continue
        if field.name not in texts:
            raise TypeError(f"{name} has no help text; add a string below the field")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        kind = str(field.type).replace("dict[str, Any]", "dict").replace("list[Any]", "list")
        yield name, Key(name=name, type=kind, default=default, doc=texts[field.name], **field.metadata)


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, by field, inherited ones included; read from the source, as
    Python does not keep them."""
    found = dict(field_texts(cls.__base__)) if dataclasses.is_dataclass(cls.__base__) else {}
    source = _classes(cls.__module__).get(cls.__name__)
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
    """Return a value as written in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_typed(item) for item in value) + "]"
    return str(value)


def did_you_mean(value: str, choices: list[str] | tuple[str, ...], cutoff: float = 0.5) -> str:
    """Return `; did you mean X?` with the choice nearest to `value`, or an empty string if none is `cutoff` (0 to 1)
    similar."""
    near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
