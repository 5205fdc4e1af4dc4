r"""Score a number within a tolerance: the number in the last box, else the first announced one, else the last one.

Formats: `-1,234.5`, `1.2 \times 10^{-3}`, `3/4`, `1 1/2`, `\frac{3}{4}`, `45%`, `$18.90`, with or without unit. Several
numbers in a box are no answer. If only one side is in percent, 45 and 0.45 both equal 45%. Arithmetic is exact.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import (
    answer_in,
    ground_truth_error,
    normalize_width,
    not_found,
    parts_of,
    verdict,
    wrong_answer,
)

MAX_NUMBER_CHARS = 400
_DIGITS = r"(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d++)?+|\.\d++)"
_TIMES = r"\s?(?:\\times|\\cdot|[x\u00d7*·])\s?"
_POWER = r"10\s?(?:\^|\*\*)\s?\{?(?P<{}>[-+]?\d++)\}?"
# A number does not start within a word, another number, an index or an exponent: x1, 2024-05-06, m^2.
_NUMBER = re.compile(
    rf"""(?<![\w.^])(?<!\^\{{)(?P<sign>[-+])?(?:\\?\$|[€£¥₹])?
    (?: (?P<lead>\d++)?\s?\\[dt]?frac\s?\{{\s?(?P<up>-?{_DECIMAL})\s?\}}\s?\{{\s?(?P<down>-?{_DECIMAL})\s?\}}
      | (?:(?P<whole>\d++)[ ])?(?P<over>{_DIGITS})\s?/\s?(?P<under>{_DIGITS})(?![\d/])
      | {_POWER.replace("{}", "bare")}
      | (?P<decimal>{_DECIMAL})
        (?: [eE](?P<power>[-+]?\d++) | {_TIMES}{_POWER.replace("{}", "ten")} )?
    )(?!\s?\^(?!\{{?\\circ)|[xyzn](?![A-Za-z]))(?P<percent>\s?\\?%)?""",
    re.VERBOSE | re.ASCII,
)
_LATEX = re.compile(r"\\[,!; ]|\{,\}|\\left(?![a-z])|\\right(?![a-z])|[\u2009\u202f]")
_FRACTIONS = {ord(char): f" {over}/{under}" for char, over, under in ("½12", "⅓13", "⅔23", "¼14", "¾34")}
_EXPONENT = re.compile(r"(?<=[A-Za-z}])(?:\^|_)\s?\{?\s?[-+]?\d{1,9}")
_ABOUT = re.compile(r"\\approx|≈")
_CLAUSE_END = re.compile(r"[,;.]\s|\s\(|\b(?:because|since|as)\b")


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | float,
    extra_info: dict[str, Any] | None = None,
    *,
    relative: float | None = None,
    absolute: float = 0.0,
) -> dict[str, Any]:
    """Return 1 if |number - truth| <= max(`absolute`, `relative` * |truth|), else 0.

    The default of `relative` is 1e-5, or 0 between two integers.
    """
    true = number_in(normalize_width(str(ground_truth))) if isinstance(ground_truth, str | int | float) else None
    if true is None or isinstance(ground_truth, bool):
        raise ground_truth_error(ground_truth, "a number")
    answer = answer_in(solution_str)
    given = number_in(answer) if answer else None
    if given is None:
        return not_found(answer, f"number of up to {MAX_NUMBER_CHARS} characters")
    values = [given[0]]
    if given[1] != true[1]:  # only one is in percent
        values.append(given[0] / 100 if given[1] else given[0] * 100)
    if any(_near(value, true[0], relative, absolute) for value in values):
        return verdict(1.0, pred=ground_truth)
    return wrong_answer(_short(given), ground_truth)


def _near(value: Fraction, true: Fraction, relative: float | None, absolute: float) -> bool:
    if relative is None:
        relative = 0.0 if value.denominator == true.denominator == 1 else 1e-5
    return abs(value - true) <= max(Fraction(absolute), Fraction(relative) * abs(true))


def number_in(text: str) -> tuple[Fraction, bool] | None:
    """Return (number, whether it is in percent) of the answer in the text, or None."""
    parts = parts_of(text)
    if parts is None:
        return None
    if parts.box is not None:
        found = _numbers(_after_equals(parts.box))
        return _value(found[0]) if len(found) == 1 else None
    found = _numbers(_clause(parts.announced_answer)) if parts.announced_answer else []
    if len(found) > 1 and found[0].string[found[0].end() : found[1].start()].strip(" $*") in ("or", "and"):
        return None
    if not found:
        found = _numbers(_after_equals(parts.text) if parts.is_tagged else parts.text)[::-1]
        if parts.is_tagged and len(found) > 1:
            return None
    return _value(found[0]) if found else None


def _clause(announced_answer: str) -> str:
    return _after_equals(_CLAUSE_END.split(announced_answer, maxsplit=1)[0])


def _after_equals(text: str) -> str:
    exact, *rounded = _ABOUT.split(text, maxsplit=1)
    result = exact.rpartition("=")[2]
    return result if not rounded or _NUMBER.search(result) else rounded[0]


def _numbers(text: str) -> list[re.Match[str]]:
    return list(_NUMBER.finditer(_EXPONENT.sub("", _LATEX.sub("", text.translate(_FRACTIONS)))))


def _value(match: re.Match[str]) -> tuple[Fraction, bool] | None:
    if len(match[0]) > MAX_NUMBER_CHARS:
        return None
    group = {name: (value or "").replace(",", "") for name, value in match.groupdict().items()}
    power = int(group["power"] or group["ten"] or group["bare"] or 0)
    if abs(power) > MAX_NUMBER_CHARS:
        return None
    try:
        if group["up"]:
            value = int(group["lead"] or 0) + Fraction(group["up"]) / Fraction(group["down"])
        elif group["over"]:
            value = int(group["whole"] or 0) + Fraction(int(group["over"]), int(group["under"]))
        else:
            value = Fraction(group["decimal"] or 1) * Fraction(10) ** power
    except ZeroDivisionError:
        return None
    return (-value if group["sign"] == "-" else value), bool(group["percent"])


def _short(number: tuple[Fraction, bool]) -> str:
    value = f"{float(number[0]):.10g}" if abs(number[0]) < 10**300 else "a huge number"
    return f"{value}%" if number[1] else value
