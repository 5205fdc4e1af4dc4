"""Score JSON against a JSON schema: the whole answer, its last code block, or the content of its `<answer>` tag or box.

The draft is set by `$schema`, else 2020-12; remote `$ref`s are not fetched. Validation has a time limit, which applies
per pattern of the schema and, in the main thread where reward functions run, to the whole validation.
"""

from __future__ import annotations

import functools
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import regex
from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import (
    answer_in,
    fenced_blocks,
    ground_truth_error,
    not_found,
    parts_of,
    strip_wrapping,
    verdict,
)

DEFAULT_TIMEOUT_S = 3.0


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Return 1 if the answer is valid for the schema, else 0; `format` is 1 for any JSON.

    `timeout_s`: limit of the validation.
    """
    try:
        validator = _validator(ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth), timeout_s)
    except (ValueError, TypeError, RecursionError, SchemaError) as error:
        raise ground_truth_error(ground_truth, f"a JSON schema ({_line(error)})") from None
    answer = answer_in(solution_str)
    if not answer:
        return not_found(answer, "JSON")
    problem = ""
    for text in _texts(answer):
        try:
            given = json.loads(text, parse_constant=_not_json)
            break
        except (ValueError, RecursionError) as error:
            problem = problem or f"not valid JSON: {_line(error)}"
    else:
        return verdict(0.0, problem, found=False)
    try:
        with _limited(timeout_s):
            error = best_match(validator.iter_errors(given))
    except TimeoutError:
        return verdict(0.0, f"validation took longer than {timeout_s:g} s")
    except (ArithmeticError, RecursionError) as error:
        return verdict(0.0, f"validation failed with {type(error).__name__}: {_line(error)}")
    except (Unresolvable, regex.error) as error:  # in a part of the schema that only this answer reaches
        raise ground_truth_error(ground_truth, f"a JSON schema ({_line(error)})") from None
    return verdict(0.0, f"{error.json_path}: {_line(error)}") if error else verdict(1.0)


REPEATED_S = 0.1


@contextmanager
def _limited(timeout_s: float) -> Iterator[None]:
    """Raise TimeoutError after `timeout_s` in the main thread; restore the previous timer at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> NoReturn:
        raise TimeoutError

    # Repeated, since an exception is lost where it interrupts a finalizer or a callback of an extension.
    handler, timer = signal.signal(signal.SIGALRM, end), signal.setitimer(signal.ITIMER_REAL, timeout_s, REPEATED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _texts(answer: str) -> list[str]:
    """Return candidates for the JSON text: the whole answer, its last code block, its unwrapped parts."""
    parts = parts_of(answer)
    text = parts.text if parts else answer
    blocks = [content for language, content in fenced_blocks(text) if language in ("", "json", "jsonc", "json5")]
    given = [answer, *blocks[-1:], text, strip_wrapping(text), *((parts.box, parts.announced_answer) if parts else ())]
    return list(dict.fromkeys(given_text for given_text in given if given_text))


@functools.lru_cache(maxsize=1000)
def _validator(text: str, timeout_s: float) -> Any:
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("it is neither an object nor a boolean")
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    # Without a registry, references would be fetched from the network.
    return _bounded(kind, timeout_s)(schema, registry=Registry())


@functools.cache
def _bounded(kind: Any, timeout_s: float) -> Any:
    def found(pattern: str, text: str) -> bool:
        return regex.search(pattern, text, timeout=timeout_s) is not None

    def matches(validator: Any, pattern: str, given: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(given, str) and not found(pattern, given):
            yield ValidationError(f"{given!r} does not match {pattern!r}")

    def properties(validator: Any, patterns: dict[str, Any], given: Any, schema: Any) -> Iterator[ValidationError]:
        for pattern, subschema in patterns.items() if isinstance(given, dict) else ():
            for key in (key for key in given if found(pattern, key)):
                yield from validator.descend(given[key], subschema, path=key, schema_path=pattern)

    def additional(validator: Any, subschema: Any, given: Any, schema: Any) -> Iterator[ValidationError]:
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key in given if isinstance(given, dict) else ():
            if key not in known and not any(found(pattern, key) for pattern in patterns):
                if subschema is False:
                    yield ValidationError(f"the property {key!r} is not allowed")
                yield from validator.descend(given[key], subschema, path=key) if subschema else ()

    return extend(kind, {"pattern": matches, "patternProperties": properties, "additionalProperties": additional})


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _line(error: Exception) -> str:
    return (getattr(error, "message", None) or str(error) or type(error).__name__).splitlines()[0][:200]
