"""Evaluate expressions at fixed pseudo-random values of their variables: exactly if rational, else to 60 digits.

Work is bounded: numbers beyond MAX_BITS, and sums that would lose digits, raise UnsupportedExpression.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from rlfuse.rewards.verifiers.math_reader import UnsupportedExpression, read

MAX_BITS = 10_000
MAX_FACTORIAL = 1_000
DIGITS = 60
POINTS = 6
_LOST, _CANCELLED = 10**30, Fraction(1, 10**45)
_context = mpmath.mp.clone()
_context.dps = DIGITS


class _Undefined(ValueError):
    """The expression has no value at this point."""


def values(latex: str) -> list[Any]:
    """Return the values of the expression at POINTS points (None if undefined); one value if it has no variables."""
    tree, variables = read(latex)
    try:
        return [_value_at(tree, variables, point) for point in range(POINTS if variables else 1)]
    except (RecursionError, OverflowError) as error:
        raise UnsupportedExpression(type(error).__name__) from None


def _value_at(tree: Any, variables: set[str], point: int) -> Any:
    known = {name: _sample(name, point) for name in variables}
    try:
        value = _bounded(_evaluate(tree, known))
    except (ZeroDivisionError, _Undefined):
        return None
    return value if _is_finite(value) else None


def _sample(name: str, point: int) -> Any:
    source = random.Random(f"{name} {point}")
    size = _context.mpf(source.randrange(10**17, 3 * 10**17)) / 10**17 - _context.mpf("0.61")
    return -size if point % 4 == 1 or (point % 4 == 3 and source.random() < 0.5) else size


def _evaluate(tree: Any, known: dict[str, Any]) -> Any:
    if isinstance(tree, Fraction):
        return tree
    operator, *parts = tree
    if operator == "symbol":
        return known[parts[0]]
    if operator in ("e", "pi"):
        return +getattr(_context, operator)
    if operator == "i":
        return _context.mpc(0, 1)
    if operator == "call":
        return _call(parts[0], _evaluate(parts[1], known))
    return _bounded(_OPERATIONS[operator](*(_evaluate(part, known) for part in parts)))


def _bounded(value: Any) -> Any:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise UnsupportedExpression("too large to be evaluated")
    elif value and _is_finite(value) and abs(_context.mag(value)) > MAX_BITS:
        raise UnsupportedExpression("too large to be evaluated")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, Fraction) or bool(_context.isfinite(value))


def to_mpf(value: Any) -> Any:
    """Convert a Fraction to a number of DIGITS digits."""
    return _context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _both(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(one: Any, other: Any) -> Any:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return operation(one, other)
        return operation(to_mpf(one), to_mpf(other))

    return apply


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    if not one or not other:
        return one or other
    one, other = to_mpf(one), to_mpf(other)
    small, large = sorted((abs(one), abs(other)))
    if large > small * _LOST:
        raise UnsupportedExpression("a sum of numbers whose magnitudes differ too much")
    result = one + other
    return Fraction(0) if abs(result) < large * to_mpf(_CANCELLED) else result


def _raise(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        power = exponent.numerator
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(power) * (bits - (bits == 1)) > MAX_BITS and base not in (0, 1, -1):
                raise UnsupportedExpression("too large to be evaluated")
            return base ** (power % 2 if abs(base) == 1 else power)
        if abs(power) > MAX_BITS:
            raise UnsupportedExpression("too large to be evaluated")
        return base**power
    base, exponent = to_mpf(base), to_mpf(exponent)
    if not base:
        return base**exponent
    if abs(exponent) * (abs(_context.log(abs(base), 2)) + 5) > MAX_BITS:
        raise UnsupportedExpression("too large to be evaluated")
    return base**exponent


def _root(value: Any, index: Any) -> Any:
    if not isinstance(index, Fraction) or index.denominator != 1 or not 1 <= index <= MAX_FACTORIAL:
        return _raise(value, _both(lambda a, b: a / b)(Fraction(1), index))
    value = to_mpf(value)
    if index % 2 and not isinstance(value, _context.mpc) and value < 0:
        return -_context.root(-value, int(index))
    return _context.root(value, int(index))


def _call(name: str, value: Any) -> Any:
    value = to_mpf(value)
    if (_context.mag(value) > 12 and name in ("exp", "sinh", "cosh", "tanh")) or _context.mag(value) > 200:
        raise UnsupportedExpression("too large to be evaluated")
    if name in ("ln", "log10") and not value:
        raise _Undefined(f"{name}(0)")
    result = _defined(getattr(_context, name), value)
    is_rounding = abs(result) < to_mpf(_CANCELLED) and abs(value) > 1e-30 and name != "exp"  # as in sin(pi)
    return Fraction(0) if is_rounding else result


def _whole(value: Any) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise UnsupportedExpression("too large to be evaluated")
    return int(value)


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction):
        return Fraction(math.factorial(_whole(value)))
    return _defined(_context.gamma, _small(value) + 1)


def _binomial(above: Any, below: Any) -> Any:
    if not (isinstance(above, Fraction) and isinstance(below, Fraction)):
        above, below = _small(to_mpf(above)), _small(to_mpf(below))
        over, under, rest = (_defined(_context.gamma, value + 1) for value in (above, below, above - below))
        return over / (under * rest)
    return Fraction(math.comb(_whole(above), _whole(below)))


def _defined(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise _Undefined(str(error)) from None


def _small(value: Any) -> Any:
    if abs(value) > 50:
        raise UnsupportedExpression("too large to be evaluated")
    return value


def _floor(value: Any) -> Any:
    if isinstance(value, _context.mpc):
        raise UnsupportedExpression("floor of a complex number")
    return Fraction(math.floor(value)) if isinstance(value, Fraction) else _context.floor(value)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": _add,
    "-": lambda value: -value,
    "*": _both(lambda one, other: one * other),
    "/": _both(lambda one, other: one / other),
    "^": _raise,
    "root": _root,
    "abs": abs,
    "!": _factorial,
    "binom": _binomial,
    "lfloor": _floor,
    "lceil": lambda value: -_floor(-value),
}
