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
_PHRASE = re.compile(r"\banswer\s*(?:is|:|=)[\s:]*", re.IGNORECASE)
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3000: " ", 0x2212: "-"}


def answer_in(solution_str: str) -> str | None:
    """The response without its thought, full-width characters and minus signs as ASCII; None where it is too long."""
    answer = answer_of(solution_str)
    return answer.translate(_FULL_WIDTH) if len(answer) <= MOST else None


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None where there is none that is closed."""
    found = None
    for found in _BOXED.finditer(text):  # noqa: B007
        pass
    if found is None:
        return None
    depth = 1
    for place in range(found.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[found.end() : place].strip()
    return None


def announced(text: str) -> str | None:
    """The rest of the line after the last "answer is" or "answer:"; None where there is none."""
    found = None
    for found in _PHRASE.finditer(text):  # noqa: B007
        pass
    if found is None:
        return None
    return (text[found.end() :].splitlines() or [""])[0].strip() or None


def verdict(score: float, reason: str = "", *, right: bool | None = None, found: bool = True) -> dict[str, Any]:
    """A verifier's result. `right` where the score is more than right or wrong."""
    accurate = bool(score) if right is None else right
    result = {"score": float(score), "acc": float(accurate), "format": float(found)}
    return {**result, "reason": reason} if reason else result


def not_found(answer: str | None, wanted: str) -> dict[str, Any]:
    """The result where the response holds no answer of the kind."""
    if answer is None:
        return verdict(0.0, f"the answer is longer than {MOST} characters", found=False)
    return verdict(0.0, f"no {wanted} in {shown(answer)}", found=False)


def wrong(found: Any, truth: Any) -> dict[str, Any]:
    """The result where the answer is not the right one."""
    return verdict(0.0, f"answered {shown(found)}, right is {shown(truth)}")


def bad_truth(ground_truth: Any, valid: str) -> ValueError:
    """The error for a ground truth that can't be read."""
    return ValueError(f"ground_truth: got {ground_truth!r:.500}; valid is {valid}. Correct the row.")


def shown(value: Any) -> str:
    """A value in a reason: its end, where answers stand."""
    text = repr(value)
    return text if len(text) <= SHOWN else "..." + text[-SHOWN:]
