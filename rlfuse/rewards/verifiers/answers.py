"""What verifiers share: the part of a response that is its final answer, and the shape of what they return.

Role: pure functions of text, linear in its length. Longer answers than MOST characters are none.
"""

from __future__ import annotations

import re
from typing import Any

from rlfuse.rewards.thoughts import answer_of

MOST = 100_000
"""Characters of an answer that is looked at."""
SHOWN = 60
"""Characters of an answer in a reason."""

_BOXED = re.compile(r"\\f?boxed\s*\{")
_PHRASE = re.compile(r"\b(?:answer|option|choice)\s*(?:is|:|=)[\s:]*", re.IGNORECASE)
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3000: " ", 0x2212: "-"}


def answer_in(solution_str: str) -> str | None:
    """The response without its thought, `folded`; None where it is too long."""
    answer = answer_of(solution_str)
    return folded(answer) if len(answer) <= MOST else None


def folded(text: str) -> str:
    """Full-width characters and minus signs as ASCII."""
    return text.translate(_FULL_WIDTH)


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None where there is none that is closed."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    depth = 1
    for place in range(starts[-1], len(text)) if starts else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[starts[-1] : place].strip()
    return None


def announced(text: str) -> str | None:
    """The rest of the line after the last "answer is", "option is", "answer:" and so on; None where there is none."""
    starts = [match.end() for match in _PHRASE.finditer(text)]
    return text[starts[-1] :].partition("\n")[0].strip() or None if starts else None


def verdict(score: float, reason: str = "", *, right: bool | None = None, found: bool = True) -> dict[str, Any]:
    """A verifier's result. `right` where the score is more than right or wrong."""
    accurate = bool(score) if right is None else right
    result = {"score": float(score), "acc": float(accurate), "format": float(found)}
    return {**result, "reason": reason} if reason else result


def not_found(answer: str | None, wanted: str) -> dict[str, Any]:
    """The result where the response holds no answer of the kind."""
    if answer is None:
        return verdict(0.0, f"the answer is longer than {MOST} characters", found=False)
    return verdict(0.0, f"no {wanted} in {excerpt(answer)}", found=False)


def wrong(found: Any, truth: Any) -> dict[str, Any]:
    """The result where the answer is not the right one."""
    return verdict(0.0, f"answered {excerpt(found)}, right is {excerpt(truth)}")


def overlapping(overlap: float, threshold: float, given: str, true: str) -> dict[str, Any]:
    """The result of an answer that covers so much of the true one, in words; right from `threshold` on."""
    right = overlap >= threshold
    return verdict(overlap, "" if right else f"answered {given}, right is {true}", right=right)


def bad_truth(ground_truth: Any, valid: str) -> ValueError:
    """The error for a ground truth that can't be read."""
    return ValueError(f"ground_truth: got {ground_truth!r:.500}; valid is {valid}. Correct the row.")


def excerpt(value: Any) -> str:
    """A value in a reason: its end, where answers stand."""
    try:
        text = repr(value)
    except ValueError:  # Python's limit
        text = "a whole number of more than 4,300 digits"
    return text if len(text) <= SHOWN else "..." + text[-SHOWN:]
