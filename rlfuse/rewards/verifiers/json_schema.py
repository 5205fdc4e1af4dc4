"""Score JSON against a schema: all of the answer, its last code block, or the content of its `<answer>` tag or box.

The draft is that of `$schema`, else 2020-12; remote `$ref`s are not fetched. Validation runs in a bounded process
(`json_schema_worker`), since regular expressions of schemas may take exponential time.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from rlfuse.rewards.sandbox.bounded import BoundedFunction, Refused
from rlfuse.rewards.thoughts import answer_only
from rlfuse.rewards.verifiers.answers import answer_in, bad_truth, fenced, not_found, parts_of, unwrapped, verdict

SECONDS = 3.0
_worker = BoundedFunction("rlfuse.rewards.verifiers.json_schema_worker")


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float = SECONDS,
) -> dict[str, Any]:
    """1 if the answer is JSON that the schema allows; `format` is 1 for any JSON."""
    try:
        schema = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
        problem = _problem(schema, timeout_s)
    except TypeError as error:
        problem = str(error)
    if problem:
        raise bad_truth(ground_truth, f"a JSON schema ({problem})")
    answer = answer_in(solution_str)
    if not answer:
        return not_found(answer, "JSON")
    try:
        said = _worker({"schema": schema, "answers": _texts(answer)}, timeout_s)
    except Refused as refused:
        return verdict(0.0, f"validating {refused}")
    if "schema" in said:  # a reference that only this answer led to
        raise bad_truth(ground_truth, f"a JSON schema ({said['schema']})")
    return verdict(not said["problem"], said["problem"], found=said["json"])


def _texts(answer: str) -> list[str]:
    """Yield candidates for the JSON: the answer as written, its last code block, its unwrapped parts."""
    parts = parts_of(answer)
    text = parts.text if parts else answer
    blocks = [content for language, content in fenced(text) if language in ("", "json", "jsonc", "json5")]
    given = [answer, *blocks[-1:], text, unwrapped(text), *((parts.box, parts.announced) if parts else ())]
    return list(dict.fromkeys(given_text for given_text in given if given_text))


@functools.lru_cache(maxsize=1000)
def _problem(schema: str, timeout_s: float) -> str:
    try:
        return _worker({"schema": schema}, timeout_s).get("schema", "")
    except Refused as refused:
        return str(refused)
