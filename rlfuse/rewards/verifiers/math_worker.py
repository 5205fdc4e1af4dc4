"""Parses and compares expressions for `math`, in a process that may be killed. Never imported by a run."""

from __future__ import annotations

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Rational
from sympy.matrices import MatrixBase

from rlfuse.rewards.sandbox.bounded_worker import serve

LATEX_ONLY = (LatexExtractionConfig(),)


def main() -> None:
    """Started by `bounded`."""
    _judge({"truth": r"\frac{1}{2}", "answer": "x+1", "percent": 0})  # loads what is loaded late
    serve(_judge)


def _judge(job: dict[str, Any]) -> dict[str, Any]:
    """Whether the answer parses and equals the truth; of a truth alone, whether it parses.

    `percent` is 1 where only the answer is in percent, -1 where only the truth is.
    """
    truth = _parse(job["truth"])
    if "answer" not in job:
        return {"parsed": truth is not None}
    answer = _parse(job["answer"])
    if answer is None:
        return {"parsed": False}
    values = [answer]
    if job["percent"]:
        values.append(answer * Rational(100) ** -job["percent"])
    # Their own limits of time need the main thread's alarm, which is ours.
    return {"parsed": True, "equal": any(verify(truth, value, timeout_seconds=None) for value in values)}


def _parse(latex: str) -> Basic | MatrixBase | None:
    found = parse(
        f"${latex}$", extraction_config=LATEX_ONLY, fallback_mode="no_fallback", parsing_timeout=None
    )  # fmt: skip
    return found[0] if found and isinstance(found[0], Basic | MatrixBase) else None
