r"""Symbolic mathematics: an expression that equals the true one, whichever way it is written.

Taken are the last `\boxed{}`, what follows "the answer is", or the whole answer, with or without `$`. It is parsed as
LaTeX and compared by math-verify (numbers, expressions, sets, intervals, equations, matrices), in a process of its own
(`math_worker`) that is bounded in time and memory and confined. Only its LaTeX grammar is used: what it does with plain
text goes through `eval`. Where one side is in percent and the other is not, both 45 and 0.45 are 45%.
Expressions are refused unseen if they are longer than LONGEST, nested deeper than DEEPEST, or name numbers too large to
be worked out.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from rlfuse.rewards.sandbox.bounded import BoundedFunction, Refused
from rlfuse.rewards.thoughts import answer_only
from rlfuse.rewards.verifiers.answers import announced, answer_in, bad_truth, boxed, not_found, verdict, wrong

LONGEST, DEEPEST = 500, 12
SECONDS = 5.0
"""Of CPU time, for reading the true expression, and for reading and comparing the answer."""

_worker = BoundedFunction("rlfuse.rewards.verifiers.math_worker")
_DELIMITED = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_HUGE = re.compile(
    r"\d{60}"  # digits
    r"|(?:\^|\*\*)[\s{(]*[-+]?\d{4}"  # exponents of four digits
    r"|\d[\s)}]*(?:\^|\*\*)[\s{(]*\d+[\s{()}]*(?:\^|\*\*)"  # towers of powers
    r"|\d{4}[\s)}]*!|!\s*!"  # factorials
)
_PLAIN = {"**": "^", "π": r"\pi ", "∞": r"\infty ", "\u00d7": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le "}
_PLAIN |= {"≥": r"\ge ", "²": "^2", "³": "^3", "\u222a": r"\cup "}
_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)|√\s*\(([^()]*)\)|√\s*(\d+|[a-z])")
_NAMES = re.compile(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln|exp|infty)(?![a-zA-Z])")


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | float,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float = SECONDS,
) -> dict[str, Any]:
    """1 if the answer equals the true expression. Comparing that takes longer than `timeout_s` is a wrong answer."""
    truth, true_percent = _truth(ground_truth, timeout_s)
    answer = answer_in(solution_str)
    part = (boxed(answer) or announced(answer) or answer) if answer else None
    if not part:
        return not_found(answer, "expression")
    latex, percent = _latex(part)
    if problem := _refusal(latex):
        return verdict(0.0, problem, found=False)
    try:
        said = _worker({"truth": truth, "answer": latex, "percent": percent - true_percent}, timeout_s)
    except Refused as refused:
        return verdict(0.0, f"comparing {latex!r:.100} {refused}")
    if not said["parsed"]:
        return not_found(part, "expression")
    return verdict(1.0) if said["equal"] else wrong(part, ground_truth)


def _truth(ground_truth: Any, timeout_s: float) -> tuple[str, bool]:
    """The true expression as LaTeX and whether it is in percent; ValueError where it is none."""
    text = str(ground_truth) if isinstance(ground_truth, str | int | float) else ""
    latex, percent = _latex(boxed(text) or text)
    problem = _refusal(latex) or _parses(latex, timeout_s)
    if problem:
        raise bad_truth(ground_truth, f"an expression in LaTeX ({problem})")
    return latex, percent


@functools.lru_cache(maxsize=10_000)
def _parses(latex: str, timeout_s: float) -> str:
    """Say why the expression does not parse; "" where it does."""
    try:
        return "" if _worker({"truth": latex}, timeout_s)["parsed"] else "it can't be parsed"
    except Refused as refused:
        return str(refused)


def _refusal(latex: str) -> str:
    """Why nothing is done with the expression; "" where it is harmless as far as one sees."""
    if not latex:
        return "no expression"
    if len(latex) > LONGEST:
        return f"an expression of {len(latex)} characters; {LONGEST} at most"
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(depth, deepest)
    if deepest > DEEPEST:
        return f"an expression nested {deepest} deep; {DEEPEST} at most"
    return "an expression of numbers too large to be worked out" if _HUGE.search(latex) else ""


def _latex(text: str) -> tuple[str, bool]:
    """An expression in LaTeX without its delimiters, and whether it was in percent."""
    if len(text) > 10 * LONGEST:
        return text, False
    for found in _DELIMITED.finditer(text):
        text = next(group for group in found.groups() if group)
    text = text.strip().rstrip(".,;").strip()
    percent = text.endswith("%")
    text = text.rstrip("%").rstrip("\\").strip() if percent else text
    text = _ROOT.sub(lambda match: rf"\sqrt{{{next(group for group in match.groups() if group is not None)}}}", text)
    for plain, latex in _PLAIN.items():
        text = text.replace(plain, latex)
    return _NAMES.sub(r"\\\1 ", text).replace("$", ""), percent
