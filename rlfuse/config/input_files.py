"""Read typed dataclasses from JSON files and report all problems together, with field, value, valid values and line.

A dataclass whose fields are annotated with the subschemas below is the only definition: `schema_of` derives the
published `*.schema.json` from it. Unknown keys are errors.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from rlfuse.config.declare import field_texts
from rlfuse.errors import UserError
from rlfuse.parsing import parse_json, parse_yaml

T = TypeVar("T")


class Schema(dict[str, Any]):
    """A JSON schema or a part of one; hashable, as required by unions of annotations."""

    def __hash__(self) -> int:
        return hash(json.dumps(self))


LARGEST = 1e18
"""Maximum of all numbers. NaN and infinity, which Python's JSON parser accepts, are rejected."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
LONGEST_FILE = 10_000_000
"""Maximum length, in characters, of files for which problems are reported with line numbers."""


class InputError(UserError):
    """An invalid input file; the message has one line per problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class WorkloadError(InputError):
    """A workload that can't be simulated."""


def number(least: float = 0, *, above: bool = False, whole: bool = False, most: float = LARGEST) -> Schema:
    """Return the schema of a number of at least (`above`: greater than) `least` and at most `most`."""
    kind, bound = "integer" if whole else "number", "exclusiveMinimum" if above else "minimum"
    return Schema({"type": kind, bound: least, "maximum": most})


def one_of(*choices: str | int) -> Schema:
    """Return the schema of one of `choices`."""
    return Schema(enum=list(choices))


FLAG = Schema(type="boolean")
Count = Annotated[int, number(1, whole=True)]
Index = Annotated[int, number(whole=True)]
AtLeastZero = Annotated[float, number()]
Positive = Annotated[float, number(above=True)]


@functools.cache
def schema_of(cls: type) -> Schema:
    """Return the JSON schema of a file with one `cls`; the strings below its fields are the descriptions."""
    schema = _of_class(cls)
    schema["properties"] = {"$schema": {"type": "string"}} | schema["properties"]  # read by editors
    return Schema({"$schema": DIALECT, "title": cls.__name__} | schema)


def _of_class(cls: type) -> dict[str, Any]:
    hints, texts = get_type_hints(cls, include_extras=True), field_texts(cls)
    properties, required = {}, []
    for entry in fields(cls):
        properties[entry.name] = dict(_of_hint(hints[entry.name]))
        if text := texts.get(entry.name):
            properties[entry.name]["description"] = text
        if entry.default is not MISSING:
            properties[entry.name]["default"] = list(entry.default) if entry.default == () else entry.default
        elif entry.default_factory is MISSING:
            required.append(entry.name)
    described = {"type": "object", "description": " ".join(cls.__doc__.split()).partition(" Raises")[0]}
    return described | {"properties": properties, "required": required, "additionalProperties": False}


def _of_hint(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if is_dataclass(hint):
        return _of_class(hint)
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _of_hint(get_args(hint)[0])}
    return {"type": "null"} if hint is type(None) else {"anyOf": [_of_hint(each) for each in get_args(hint)]}


def read(cls: type[T], data: Any, error: type[InputError]) -> T:
    """Build a `cls` from decoded JSON. Raises `error` with all problems of its fields."""
    problems = dict.fromkeys(line for wrong in _validator(cls).iter_errors(data) for line in _explain(wrong, cls))
    if problems:
        raise error(*problems)
    return _build(cls, {name: value for name, value in data.items() if name != "$schema"})


@functools.cache
def _validator(cls: type) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def real(_: Any, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    kinds = {
        "number": real,
        "integer": lambda _, value: real(_, value) and value == int(value),
        "array": lambda _, value: isinstance(value, list | tuple),
    }
    checker = Draft202012Validator.TYPE_CHECKER.redefine_many(kinds)
    return extend(Draft202012Validator, type_checker=checker)(schema_of(cls))


def _explain(wrong: Any, cls: type) -> Iterator[str]:
    where = _name(wrong.absolute_path)
    prefix, known = f"{where}." if where else "", wrong.schema.get("properties", {})
    branches: dict[int, list[Any]] = {}
    for each in wrong.context:
        branches.setdefault(each.schema_path[0], []).append(each)
    meant = [each for each in branches.values() if not any(e.validator == "type" and not e.relative_path for e in each)]
    if meant:
        for each in meant[0]:
            yield from _explain(each, cls)
    elif wrong.validator == "additionalProperties":
        for name in (name for name in wrong.instance if name not in known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            close = f"did you mean {prefix}{near[0]}?" if near else f"valid fields: {_listed(known)}"
            yield f"{prefix}{name}: unknown field; {close}"
    elif wrong.validator == "required":
        for name in (name for name in wrong.validator_value if name not in wrong.instance):
            yield f"{prefix}{name} is missing: add it to {where or f'the {cls.__name__.lower()}'}"
    else:
        value = wrong.instance
        finite = isinstance(value, int | float) and math.isfinite(value)
        top = f", at most {LARGEST:g}" if finite and value > LARGEST == wrong.schema.get("maximum") else ""
        yield f"{where or cls.__name__.lower()}={_shortened(value)}: needs {_needed(wrong.schema)}{top}"


def _needed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_needed(each) for each in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema["type"]
    if kind in ("integer", "number"):
        least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
        bound = f"of at least {least:g}" if above is None else f"above {above:g}"
        if "exclusiveMaximum" in schema:
            bound += f" and below {schema['exclusiveMaximum']:g}"
        elif schema["maximum"] < LARGEST:
            bound += f", at most {schema['maximum']:,}"
        return f"{'a whole number' if kind == 'integer' else 'a number'} {bound}"
    words = {"boolean": "true or false", "string": "a non-empty string", "array": "a list, [...]", "null": "null"}
    return words.get(kind) or f"an object with {_listed(schema['properties'])}"


def _listed(properties: Iterable[str]) -> str:
    return ", ".join(name for name in properties if name != "$schema")


def _name(path: Any) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _build(hint: Any, value: Any) -> Any:
    for kind in _kinds(hint):
        if is_dataclass(kind) and isinstance(value, dict):
            hints = get_type_hints(kind, include_extras=True)
            return kind(**{name: _build(hints[name], each) for name, each in value.items()})
        if get_origin(kind) is tuple and isinstance(value, list | tuple):
            return tuple(_build(get_args(kind)[0], each) for each in value)
        if kind in (bool, int, float, str) and not isinstance(value, dict | list | tuple | None):
            return kind(value)
    return None


def _kinds(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from _kinds(each)
    else:
        yield hint


def read_json(path: Path, parse: Callable[[Any], T], kind: str, error: type[InputError]) -> T:
    """Read a JSON file and return `parse` of its content. Raises `error`, also for errors of `parse`, with file and
    line."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return parse(parse_json(text))
    except OSError as cause:
        raise error(f"{path}: {cause.strerror}; give the path of a JSON file with a {kind}") from cause
    except error as cause:
        lines = lines_of(text)
        raise error(*(f"{path}{line_of(problem, lines)}: {problem}" for problem in cause.problems)) from cause
    except ValueError as cause:
        raise error(f"{path}: {cause}; a {kind} must be one JSON object") from cause


def read_yaml(path: Path, cls: type[T], error: type[InputError], hint: str, option: str = "") -> T:
    """Read a YAML file as `cls`. Raises `error` with the file, and each invalid field with its line."""
    text = ""
    try:
        text = path.read_text()
        return read(cls, parse_yaml(text), error)
    except error as cause:
        lines = lines_of(text)
        raise error(*(f"{option}{path}{line_of(problem, lines)}: {problem}" for problem in cause.problems)) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        raise error(f"{option}{path}: can't be read as YAML: {cause}; {hint}") from cause


def unwritable(option: str, path: Path | None, *endings: str) -> list[str]:
    """Return the problems of the name of an output file; none if `path` is None."""
    if path is None:
        return []
    if endings and path.suffix not in endings:
        return [f"{option} {path}: the name must end in {' or '.join(endings)}"]
    return [] if path.absolute().parent.is_dir() else [f"{option} {path}: the folder does not exist; create it first"]


def line_of(problem: str, lines: dict[str, int]) -> str:
    """Return the line (`:12`) of the field that a problem begins with, or of its nearest parent; empty if unknown."""
    name = re.match(r"[\w.\[\]$]*", problem)[0]
    while name and name not in lines:
        name = re.sub(r"(^|\.)[^.\[]*$|\[\d+\]$", "", name)
    return f":{lines[name]}" if name else ""


def lines_of(text: str) -> dict[str, int]:
    """Return the line of each field of YAML or JSON by its dotted name. JSON is parsed as YAML, which keeps lines."""
    found: dict[str, int] = {}

    def visit(node: yaml.Node, name: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{name}.{key.value}".removeprefix(".")
                found[inner] = key.start_mark.line + 1
                visit(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, each in enumerate(node.value):
                found[f"{name}[{index}]"] = each.start_mark.line + 1
                visit(each, f"{name}[{index}]")

    if len(text) <= LONGEST_FILE:
        try:
            visit(yaml.compose(text, Loader=yaml.CSafeLoader), "")
        except (yaml.YAMLError, RecursionError):  # some JSON is not valid YAML
            return {}
    return found


def publish(data: Any, target: str, then: str, error: type[InputError]) -> None:
    """Print `data` if `target` is `-`; otherwise write it to a new file and print the next command."""
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as cause:
        raise error(f"{path}: {cause.strerror}; give the name of a new file in a folder that exists") from cause
    print(f"wrote {path}; next: {then.format(path=path)}")
