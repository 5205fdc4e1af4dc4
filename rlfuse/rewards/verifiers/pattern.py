"""A regular expression that the answer fits, as the `regex` package has them (Python's syntax and more).

Matching is bounded in time, since a pattern such as `(a+)+b` may take for ever to find that an answer does not fit.
"""

from __future__ import annotations

import functools
from typing import Any

import regex

from rlfuse.rewards.thoughts import answer_only
from rlfuse.rewards.verifiers.answers import answer_in, bad_truth, excerpt, not_found, verdict

SECONDS = 1.0


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    anywhere: bool = False,
    timeout_s: float = SECONDS,
) -> dict[str, Any]:
    """1 if the whole answer fits the pattern or, with `anywhere`, a part of it. Too slow to tell counts as no fit."""
    try:
        pattern = _compiled(ground_truth)
    except (regex.error, TypeError, ValueError) as error:
        raise bad_truth(ground_truth, f"a regular expression ({error})") from None
    answer = answer_in(solution_str)
    if not answer:
        return not_found(answer, "text")
    try:
        fits = (pattern.search if anywhere else pattern.fullmatch)(answer, timeout=timeout_s)
    except TimeoutError:
        return verdict(0.0, f"matching took longer than {timeout_s:g} s")
    return verdict(1.0) if fits else verdict(0.0, f"{excerpt(answer)} does not fit {ground_truth!r:.100}")


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)
