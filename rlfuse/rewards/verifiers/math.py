r"""Score a mathematical expression by its equivalence to the true expression.

The answer is the last `\boxed{}`, else the announced answer, else the last formula, else the last line. A ground truth
that cannot be parsed is compared as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import (
    Parts,
    answer_in,
    boxed,
    ground_truth_error,
    normalize_width,
    not_found,
    parts_of,
    strip_wrapping,
    verdict,
    wrong_answer,
)
from rlfuse.rewards.verifiers.math_structure import is_equivalent
from rlfuse.rewards.verifiers.math_text import canonical, key

MAX_CHARS, MAX_DEPTH = 500, 12
"""Characters and nested brackets of an expression; larger ones are compared as text."""

_DELIMITER = re.compile(r"(?<!\\)(?:\$\$?|\\[()[\]])")
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_WORD = re.compile(r"[A-Za-z]+")
_CLAUSE_END = re.compile(r"[.!]\s{1,4}(?=[A-Z])|[,;]?\s(?:because|since|which|where|as|by|using|given|so|not)\b")


@answer_only
def score(
    data_source: str, solution_str: str, ground_truth: str | float, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return 1 if the answer is equivalent to the true expression, else 0."""
    truth = _true_expression(ground_truth)
    answer = answer_in(solution_str)
    parts = parts_of(answer) if answer else None
    if parts is None:
        return not_found(answer, "expression")
    part = _stated(parts)
    given = canonical(part)
    if not given:
        return not_found(part, "expression")
    if key(given) == key(truth):
        return verdict(1.0, pred=ground_truth)
    for text in (given, truth):
        if problem := _too_large(text):
            return verdict(0.0, f"{problem}; compared as text only", found=text is truth)
    if is_equivalent(truth, given):
        return verdict(1.0, pred=ground_truth)
    return wrong_answer(part, ground_truth)


def _true_expression(ground_truth: Any) -> str:
    valid = isinstance(ground_truth, str) or (isinstance(ground_truth, int | float) and math.isfinite(ground_truth))
    text = str(ground_truth) if valid else ""
    in_box = boxed(text)
    truth = canonical(strip_wrapping(normalize_width(in_box if in_box is not None else text)))
    if not truth:
        raise ground_truth_error(ground_truth, "an expression in LaTeX")
    return truth


def _stated(parts: Parts) -> str:
    if parts.box is not None:
        return parts.box
    if parts.announced_answer is not None:
        return _CLAUSE_END.split(parts.announced_answer, maxsplit=1)[0]
    return _last_formula(parts.text)


def _last_formula(text: str) -> str:
    """Return the last line if it is a formula with at most one word, else the last formula, else the last line."""
    text = strip_wrapping(text)
    spans = _formulas(text)
    line_start = text.rfind("\n") + 1
    line = strip_wrapping(text[line_start:])
    if not spans:
        return line
    start, end = spans[-1]
    words = _WORD.findall("".join(_outside(text, spans, line_start)))
    if start >= line_start and (len(words) < 2 or set(words) <= {"and", "or"}):
        return line
    return text[start:end]


def _formulas(text: str) -> list[tuple[int, int]]:
    spans, opened, start = [], "", 0
    for match in _DELIMITER.finditer(text):
        if not opened and match[0] in _CLOSING:
            opened, start = match[0], match.end()
        elif opened and match[0] == _CLOSING[opened]:
            spans.append((start, match.start()))
            opened = ""
    return spans


def _outside(text: str, spans: list[tuple[int, int]], place: int) -> Iterator[str]:
    for start, end in spans:
        if start >= place:
            yield text[place:start]
            place = end
    yield text[place:]


def _too_large(text: str) -> str:
    if len(text) > MAX_CHARS:
        return f"an expression of {len(text)} characters exceeds the limit of {MAX_CHARS}"
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(depth, deepest)
    return f"an expression of nesting depth {deepest} exceeds the limit of {MAX_DEPTH}" if deepest > MAX_DEPTH else ""
