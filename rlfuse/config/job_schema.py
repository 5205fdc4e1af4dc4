"""JSON schema of a job file, from the declared keys, for editors: `rlfuse train --help --json-schema`.

It describes types, valid values and names; rules for several keys are in `checks.py`. Names of verl, which a job file
may also have, are reported as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlfuse.config.declare import Key, declared
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.rewards import RewardEntry

OPTION = "--json-schema"
Schema = dict[str, Any]
_DEFINITIONS = "#/definitions/"
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}
"""A value with a reference to another key, `${key}`, or an expression."""
_FUNCTION = {"type": "string", "pattern": r"^.+\.py:[A-Za-z_]\w*$"}
_TYPES: Mapping[str, Schema] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": ["string", "number"]},
    "Any": {},
}


def job_schema(presets: Mapping[str, Sequence[str]]) -> Schema:
    """Return the schema. `presets`: group of presets -> their names.

    A key may be written below its group or as a dotted name at any level, as `rlfuse.config.job_file` reads it.
    """
    entry = {key.name: _described(key) for key in declared(RewardEntry)}
    definitions = {name: _described(key) for name, key in by_name().items()}
    definitions["reward.functions[]"] = _closed(entry, " ".join((RewardEntry.__doc__ or "").split())) | {
        "required": ["path"]
    }
    definitions |= {name: _closed(_below(f"{name}."), text) for name, text in groups().items()}
    top = _below("")
    for group, names in presets.items():
        preset: Schema = {"enum": [*names, *([None] if group == "experiment" else [])]}
        if group in groups():  # in `anyOf`, the message for an unknown key of the group would be the list of presets
            below = {"if": {"type": "object"}, "then": top[group]}
            top[group] = {"anyOf": [preset, {"type": "object"}], **below}
        else:
            top[group] = preset
        top[group]["description"] = f"Preset: {' | '.join(names)}. {groups().get(group, '')}".strip()
    other = {"defaults": {"type": "array", "description": "Presets in Hydra's form."}, "hydra": {"type": "object"}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Job file of rlfuse",
        **_closed({**top, **other}),
        "definitions": definitions,
    }


def _below(prefix: str) -> dict[str, Schema]:
    """Return the keys and groups below a prefix, by the rest of their names."""
    names = [name for name in (*groups(), *by_name()) if name.startswith(prefix)]
    return {name.removeprefix(prefix): {"$ref": f"{_DEFINITIONS}{name}"} for name in names}


def _closed(properties: Mapping[str, Schema], description: str = "") -> Schema:
    found: Schema = {"type": "object", "properties": dict(properties)}
    closed: Schema = {"additionalProperties": False}
    refers = {name: each.get("$ref", "").removeprefix(_DEFINITIONS) for name, each in properties.items()}
    dictionaries = {key.name for key in by_name().values() if key.type.startswith("dict")}
    if free := [re.escape(name) for name, key in refers.items() if key in dictionaries]:
        pattern = rf"^({'|'.join(free)})\.."
        closed["properties"] = dict.fromkeys(properties, True)
        # The message for an unknown key would have the pattern, which thus applies only to objects that need it.
        closed = {
            "if": {"propertyNames": {"not": {"pattern": pattern}}},
            "then": closed,
            "else": closed | {"patternProperties": {pattern: True}},
        }
    return {"description": description} | found | closed if description else found | closed


def _described(key: Key) -> Schema:
    forms = [_form(key), _REFERENCE]
    if key.accepts_entry:
        forms.insert(1, forms[0]["items"])
    if key.optional:
        forms.append({"type": "null"})
    notes = (key.unit, key.limits, f"on resume: {key.resume.effect.label} ({key.resume.reason})")
    found: Schema = {"description": f"{key.text} [{'; '.join(filter(None, notes))}]", "anyOf": forms}
    return found if key.required else found | {"default": key.default}


def _form(key: Key) -> Schema:
    """Return the schema of the values of a key, except null and references."""
    kind, _, inner = key.type.removesuffix(" | None").partition("[")
    if kind == "dict":
        return {
            "type": "object",
            "additionalProperties": _TYPES[inner.removesuffix("]").removeprefix("str, ") or "Any"],
        }
    if key.name == "reward.functions":
        return {"type": "array", "items": {"anyOf": [_TYPES["str"], {"$ref": "#/definitions/reward.functions[]"}]}}
    value = _value(key, _TYPES[inner.removesuffix("]") or "Any"] if kind == "list" else _TYPES[kind])
    return {"type": "array", "items": value} if kind == "list" else value


def _value(key: Key, typed: Schema) -> Schema:
    if key.choices:
        names = {"enum": [*key.names, *[False] * ("false" in key.names)]}
        return {"anyOf": [names, _FUNCTION]} if key.custom else names
    limits = {"exclusiveMinimum": key.above, "minimum": key.at_least, "maximum": key.at_most}
    bounded = typed | {name: limit for name, limit in limits.items() if limit is not None}
    return {"anyOf": [{"const": -1}, bounded]} if key.or_minus_one else bounded
