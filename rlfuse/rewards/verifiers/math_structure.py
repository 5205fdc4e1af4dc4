"""Compare two canonical expressions: as text, then by structure, then by value.

Sets match in any order, tuples and intervals in order with equal brackets, equations up to a constant factor,
quantities after unit conversion. A missing unit is accepted, a different one is not. Unparsed text equals only itself.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any, NamedTuple

from rlfuse.rewards.verifiers.math_reader import UnsupportedExpression
from rlfuse.rewards.verifiers.math_text import key
from rlfuse.rewards.verifiers.math_value import to_mpf, values
from rlfuse.rewards.verifiers.units import conversion_factor, quantity

MAX_PARTS = 40
ROUNDED = Fraction(1, 10**5)
"""Relative difference of decimal numbers that counts as rounding; EXACT if the truth is an integer."""
EXACT = Fraction(1, 10**9)
_IDENTICAL = Fraction(1, 10**40)
_SCAN = re.compile(r"\\\\|\\[A-Za-z]++|\\.|[(\[{]|[)\]}]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[^\\]", re.DOTALL)
_OPENING, _CLOSING = {"(", "[", "{", r"\{"}, {")", "]", "}", r"\}"}
_CONNECTIVE = re.compile(r"\\text\{\s?(and|or)\s?\}")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_BASE = re.compile(r"(?:\(|\\text\{)?\s?([0-9A-Z]{1,400}+)\s?[)}]?\s?_\s?\{?\s?(\d{1,2}|\\text\{\w{1,10}\})\s?\}?")
_BASE_WORDS = re.compile(r"([0-9A-Z]{1,400}+)\s?(?:\\text\{\s?)?(?:in )?base (\w{1,10})\s?\}?", re.IGNORECASE)
_BASE_NAMES = dict(
    two="2", three="3", four="4", five="5", six="6", seven="7", eight="8", nine="9", ten="10", eleven="11", twelve="12",
    sixteen="16",
)  # fmt: skip
_CLOCK = re.compile(r"(\d{1,4}(?:\s?:\s?\d{1,4}){1,3})\s?(?:\\text\{)?\s?([ap]\.?\s?m\.?)?\s?\}?", re.IGNORECASE)
_NAME = re.compile(
    r"(?:[A-Za-z]|\\[a-z]{2,8})\s?'{0,2}(?:_\s?(?:\w|\{\w{1,10}\}))?(?:\s?\([a-z]\))?|\\text\{[^{}]{1,40}\}"
)
_MEMBER = re.compile(rf"(?:{_NAME.pattern})\s?\\in(?![a-z])\s?")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})++(?![\d,])")
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_DECIMAL = re.compile(r"\.\d")
_COMPARED = {"<": ("<", False), r"\le": ("<=", False), ">": ("<", True), r"\ge": ("<=", True), r"\neq": ("!=", False)}


class Part(NamedTuple):
    """Part of an expression: its kind, a mark that distinguishes parts of the same kind, and its sub-parts."""

    kind: str
    mark: str
    parts: list[str]


def is_equivalent(truth: str, answer: str) -> bool:
    """Return whether the answer is equivalent to the truth."""
    if key(truth) == key(answer):
        return True
    one, other = _read(truth), _read(answer)
    if one.kind == other.kind:
        return _same_kind(one, other)
    for part, rest in ((one, answer), (other, truth)):
        if part.kind == "equation" and _names(part.parts[0]):  # x = 5, or (x, y) = (1, 2)
            return is_equivalent(part.parts[-1], rest) if part is one else is_equivalent(rest, part.parts[-1])
        is_ratio = part.kind == "ratio" and len(part.parts) == 2 and not part.mark and part.parts[1][0] != "0"
        if is_ratio and _read(rest).kind == "value":  # 3:4, but not 10:08
            return _same_value(rf"\frac{{{part.parts[0]}}}{{{part.parts[1]}}}", rest)
    if {one.kind, other.kind} == {"set", "list"}:
        return _same_solutions(one.parts, other.parts)
    intervals = [_as_intervals(part) for part in (one, other)]
    return all(intervals) and _same_in_any_order(*intervals)


def _names(side: str) -> bool:
    if _NAME.fullmatch(side):
        return True
    part = _read(side)
    return part.kind == "tuple" and all(map(_NAME.fullmatch, part.parts)) and part.parts == sorted(part.parts)


def _same_kind(one: Part, other: Part) -> bool:
    if one.kind == "value":
        return _same_value(one.parts[0], other.parts[0])
    if one.kind == "equation":
        return _same_equation(one.parts, other.parts)
    if one.kind == "ratio":
        return _marks_agree(one.mark, other.mark) and [*map(int, one.parts)] == [*map(int, other.parts)]
    if one.kind == "list":
        related = any(_read(each).kind == "relation" for each in one.parts)
        return (one.mark == other.mark or not related) and _same_solutions(one.parts, other.parts)
    if one.kind in ("set", "union"):
        return _same_in_any_order(one.parts, other.parts)
    pairs = list(zip(one.parts, other.parts, strict=False))
    return one.mark == other.mark and len(one.parts) == len(other.parts) and all(is_equivalent(*pair) for pair in pairs)


def _marks_agree(one: str, other: str) -> bool:
    return not one or not other or one == other


def _same_in_any_order(truths: list[str], answers: list[str]) -> bool:
    if len(truths) != len(answers) or len(truths) > MAX_PARTS:
        return False
    left = list(answers)
    for truth in truths:
        match = next((answer for answer in left if is_equivalent(truth, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_solutions(truths: list[str], answers: list[str]) -> bool:
    """Compare lists such as `x = 1, x = 2` or `1, 2` in any order; `x = 1, y = 2` must have equal names."""
    sides = [[_named_value(each) for each in texts] for texts in (truths, answers)]
    names = [{name for name, _ in side if name} for side in sides]
    if max(map(len, names)) > 1:
        return names[0] == names[1] and _same_in_any_order(truths, answers)
    return _same_in_any_order(*([value for _, value in side] for side in sides))


def _named_value(text: str) -> tuple[str, str]:
    part = _read(text)
    if part.kind == "equation" and _NAME.fullmatch(part.parts[0]):
        return key(part.parts[0]), part.parts[-1]
    return "", text


@functools.lru_cache(maxsize=10_000)
def _read(text: str) -> Part:
    text = _member_of(_CONNECTIVE.sub(r" \1 ", text).strip())
    if base := _BASE.fullmatch(text) or _BASE_WORDS.fullmatch(text):
        name = base[2].removeprefix(r"\text{").rstrip("}").removeprefix("base").strip().lower()
        return Part("base", _BASE_NAMES.get(name, name), [base[1].lstrip("0") or "0"])
    if matrix := _MATRIX.fullmatch(text):
        rows = [
            [cell.strip() for cell in row.split("&")] for row in matrix[2].strip().removesuffix("\\\\").split("\\\\")
        ]
        kind = matrix[1] if matrix[1] in "vV" else ""
        return Part("matrix", f"{kind}{[len(row) for row in rows]}", [cell for row in rows for cell in row])
    if clock := _CLOCK.fullmatch(text):
        half = (clock[2] or "").replace(".", "").replace(" ", "").lower()
        return Part("ratio", half, [number.strip() for number in clock[1].split(":")])
    if inner := _enclosed(text):
        return inner
    if not set(text) & set("([|"):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    for split in (_split_list, _split_union, _split_relation, _split_sign):
        if part := split(text):
            return part
    return Part("value", "", [text])


def _member_of(text: str) -> str:
    member = _MEMBER.match(text)
    return text[member.end() :] if member else text


def _pieces(text: str, *separators: str) -> tuple[list[str], list[str]]:
    """Split at separators outside brackets. Return the pieces and the separators between them."""
    pieces, found, depth, start = [], [], 0, 0
    for match in _SCAN.finditer(text):
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING)
        if not depth and match[0] in separators:
            pieces.append(text[start : match.start()].strip())
            found.append(match[0])
            start = match.end()
    return [*pieces, text[start:].strip()], found


def _enclosed(text: str) -> Part | None:
    """Parse a tuple or interval `(a, b]`, or a set `\\{a, b\\}`; None for anything else, such as (x+1)(x+2)."""
    tokens = [match for match in _SCAN.finditer(text)]
    if not tokens or tokens[0][0] not in _OPENING or tokens[-1][0] not in _CLOSING:
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if not depth:
            return None
    opening, closing, inner = tokens[0][0], tokens[-1][0], text[tokens[0].end() : tokens[-1].start()]
    parts, _ = _pieces(inner, ",")
    if opening == r"\{":
        built = any(mark in inner for mark in ("|", ":"))
        return None if built else Part("set", "", parts if inner.strip() else [])
    if len(parts) > 1:
        return Part("tuple", opening + closing, parts)
    return _read(inner) if opening == "(" and closing == ")" else None


def _split_list(text: str) -> Part | None:
    parts, found = _pieces(text, ",", "and", "or")
    parts = [part for part in parts if part]  # "1, 2, and 3"
    return Part("list", next((word for word in found if word != ","), ","), parts) if len(parts) > 1 else None


def _split_union(text: str) -> Part | None:
    parts, found = _pieces(text, r"\cup")
    return Part("union", "", parts) if found else None


def _split_relation(text: str) -> Part | None:
    parts, found = _pieces(text, "=", *_COMPARED, r"\in", r"\approx", r"\pmod", r"\equiv")
    if not found:
        return None
    if set(found) == {"="}:
        return Part("equation", "", parts)
    if not set(found) <= _COMPARED.keys():
        return None
    signs = [_COMPARED[sign] for sign in found]
    if len({turned for _, turned in signs}) > 1:
        return None
    kinds = [sign for sign, _ in signs]
    if signs[0][1]:
        parts, kinds = parts[::-1], kinds[::-1]
    return Part("relation", " ".join(kinds), parts)


def _split_sign(text: str) -> Part | None:
    if text.count(r"\pm") != 1:
        return None
    before, after = text.split(r"\pm")
    return Part("list", ",", [f"{before} {sign} {after}".strip() for sign in "+-"])


def _as_intervals(part: Part) -> list[str]:
    if part.kind == "tuple":
        return [f"{part.mark[0]}{part.parts[0]},{part.parts[1]}{part.mark[1]}"] if len(part.parts) == 2 else []
    if part.kind == "union" or (part.kind == "list" and part.mark == "or"):
        found = [_as_intervals(_read(each)) for each in part.parts]
        return [each for intervals in found for each in intervals] if all(found) else []
    if part.kind != "relation" or "!=" in part.mark:
        return []
    kinds, parts = part.mark.split(), part.parts
    named = [bool(_NAME.fullmatch(each)) and not each.startswith((r"\infty", r"\pi")) and each != "e" for each in parts]
    if len(parts) == 2 and named == [False, True]:
        parts, kinds, named = [*parts, r"\infty"], [*kinds, "<"], [False, True, False]
    elif len(parts) == 2 and named == [True, False]:
        parts, kinds, named = [r"-\infty", *parts], ["<", *kinds], [False, True, False]
    if named != [False, True, False]:
        return []
    low, high = ("(" if kinds[0] == "<" else "["), (")" if kinds[1] == "<" else "]")
    return [f"{low}{parts[0]},{parts[2]}{high}"]


def _same_equation(one: list[str], other: list[str]) -> bool:
    if len(one) == len(other) == 2:
        if any(all(map(is_equivalent, one, pair)) for pair in (other, other[::-1])):
            return True
        return _proportional(*(_values(f"({left})-({right})") for left, right in (one, other)))
    return key(one[0]) == key(other[0]) and is_equivalent(one[-1], other[-1])


def _proportional(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    pairs = [pair for pair in zip(one or (), other or (), strict=False) if None not in pair]
    if len(pairs) < 3 or any(not a or not b for a, b in pairs):
        return False
    factors = [to_mpf(a) / to_mpf(b) for a, b in pairs]
    return all(_close(factor, factors[0], _IDENTICAL) for factor in factors)


def _same_value(truth: str, answer: str) -> bool:
    (true, true_unit), (given, unit) = quantity(truth), quantity(answer)
    if not true_unit and not unit:
        return _equal(true, given)
    if true_unit and unit:
        factor = conversion_factor(unit, true_unit)
        return factor is not None and _equal(true, given, factor)
    if "%" in (true_unit, unit):  # 45 and 0.45 are both 45%
        return _equal(true, given) or _equal(true, given, Fraction(1, 100) if unit else Fraction(100))
    if r"\degree" in (true_unit, unit) and r"\pi" in (given if true_unit else true):
        return _equal(truth, answer)
    # One side has no unit, or is the product 5m where the other is 5 m.
    return _equal(true, given) or _equal(truth, answer)


def _equal(truth: str, answer: str, factor: Fraction = Fraction(1)) -> bool:
    if key(truth) == key(answer):
        return factor == 1
    if any(_is_name(text) for text in (truth, answer)):
        return False
    true, given = _values(truth), _values(answer)
    if true is None or given is None:
        return False
    constant = len(true) == len(given) == 1
    if len(true) != len(given):
        true, given = (each * max(len(true), len(given)) if len(each) == 1 else each for each in (true, given))
    tolerance = _IDENTICAL
    if _DECIMAL.search(truth) or _DECIMAL.search(answer):
        whole = constant and isinstance(true[0], Fraction) and true[0].denominator == 1
        tolerance = ROUNDED if constant and not whole else EXACT
    pairs = [(a, b * factor if factor == 1 or isinstance(b, Fraction) else b * to_mpf(factor))
             for a, b in zip(true, given, strict=True) if a is not None and b is not None]  # fmt: skip
    return len(pairs) >= (1 if constant else 3) and all(_close(a, b, tolerance) for a, b in pairs)


def _is_name(text: str) -> bool:
    """Return whether letters are a word or a geometric name instead of a product: on, east, AB."""
    letters = text.strip()
    if not _LETTERS.fullmatch(letters):
        return False
    known = letters == "abc" or not set("xyz").isdisjoint(letters) or set("aeiou").isdisjoint(letters)
    return not (
        letters.islower() and len(letters) <= 4 and (known or len(letters) == 2) and set("eio").isdisjoint(letters)
    )


@functools.lru_cache(maxsize=10_000)
def _values(text: str) -> tuple[Any, ...] | None:
    try:
        return tuple(values(text))
    except UnsupportedExpression:
        return None


def _close(one: Any, other: Any, tolerance: Fraction) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        if tolerance == _IDENTICAL:
            return one == other
        return abs(one - other) <= tolerance * abs(one)
    one, other = to_mpf(one), to_mpf(other)
    return bool(abs(one - other) <= to_mpf(tolerance) * abs(one))
