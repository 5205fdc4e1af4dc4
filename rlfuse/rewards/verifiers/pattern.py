"""Score an answer by a regular expression (package `regex`), with a time limit."""

from __future__ import annotations

import functools
from typing import Any

import regex

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import answer_in, excerpt, ground_truth_error, not_found, parts_of, verdict

DEFAULT_TIMEOUT_S = 1.0


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    anywhere: bool = False,
    as_written: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Return 1 if the pattern matches the whole answer, as written or unwrapped, else 0.

    `as_written`: match only the answer as written.
    `anywhere`: search in the answer as written.
    `timeout_s`: a longer search counts as no match.
    """
    try:
        pattern = _compiled(ground_truth)
    except (regex.error, TypeError, ValueError) as error:
        raise ground_truth_error(ground_truth, f"a regular expression ({error})") from None
    answer = answer_in(solution_str)
    if not answer:
        return not_found(answer, "text")
    parts = None if anywhere or as_written else parts_of(answer)
    given = [answer, *([parts.stated] if parts else ())]
    try:
        fits = any((pattern.search if anywhere else pattern.fullmatch)(text, timeout=timeout_s) for text in given)
    except TimeoutError:
        return verdict(0.0, f"matching took longer than {timeout_s:g} s")
    return verdict(1.0) if fits else verdict(0.0, f"{excerpt(answer)} does not match {ground_truth!r:.100}")


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)
