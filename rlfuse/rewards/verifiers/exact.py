"""Score an exact match of the text, ignoring white space and wrapping (quotes, emphasis, boxes)."""

from __future__ import annotations

from typing import Any

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import (
    answer_in,
    ground_truth_error,
    not_found,
    parts_of,
    strip_wrapping,
    verdict,
    wrong_answer,
)


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | list[str],
    extra_info: dict[str, Any] | None = None,
    *,
    ignore_case: bool = False,
) -> dict[str, Any]:
    """Return 1 if the answer equals the ground truth, or one of a list of ground truths, else 0."""
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truths, list | tuple) or not truths or not all(isinstance(t, str) and t.strip() for t in truths):
        raise ground_truth_error(ground_truth, "a non-empty text or a list of them")
    answer = answer_in(solution_str)
    if answer and _plain(answer, ignore_case) in {_plain(truth, ignore_case) for truth in truths}:
        return verdict(1.0, pred=truths[0])
    parts = parts_of(answer) if answer else None
    if parts is None:
        return not_found(answer, "text")
    right = {_plain(strip_wrapping(truth), ignore_case) for truth in truths}
    if _plain(parts.stated, ignore_case) in right:
        return verdict(1.0, pred=truths[0])
    return wrong_answer(parts.stated, truths[0])


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(text.split())
    return plain.casefold() if ignore_case else plain
