"""Validate JSON for `json_schema` in a process that may be killed. Never imported by a run."""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from rlfuse.rewards.sandbox.bounded_worker import serve


def main() -> None:
    """Started by `bounded`."""
    serve(_validate)


def _validate(job: dict[str, Any]) -> dict[str, Any]:
    """Validate the first of `answers` that is JSON. Return `schema` (its fault), or `json` and `problem`."""
    try:
        validator = _validator(job["schema"])
    except (ValueError, RecursionError, SchemaError) as error:
        return {"schema": _line(error)}
    if "answers" not in job:
        return {}
    problem = ""
    for text in job["answers"]:
        try:
            given = json.loads(text, parse_constant=_not_json)
            break
        except (ValueError, RecursionError) as error:
            problem = problem or f"no JSON: {_line(error)}"
    else:
        return {"json": False, "problem": problem}
    try:
        error = best_match(validator.iter_errors(given))
    except Unresolvable as unresolvable:
        return {"schema": _line(unresolvable)}
    return {"json": True, "problem": f"{error.json_path}: {_line(error)}" if error else ""}


@functools.lru_cache(maxsize=100)
def _validator(text: str) -> Any:
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("neither an object nor true or false")
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())  # its default fetches references from the network


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _line(error: Exception) -> str:
    return (getattr(error, "message", None) or str(error) or type(error).__name__).splitlines()[0][:200]
