r"""The value of an expression in LaTeX, exact where it is rational, else to 60 digits.

Role: `values` reads an expression into a tree and evaluates it at fixed pseudo-random values of its variables, so that
two expressions are identical if their values are. Whatever is not understood in full is Unreadable and left to the
comparison of texts: f(x), integrals, numbers in other bases, two numbers side by side.
Invariants: work is bounded. A number has MAX_BITS bits at most, before and after the point; larger powers and
factorials are Unreadable without being calculated. Digits that a sum would lose are Unreadable, too.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

MAX_BITS = 10_000
MAX_FACTORIAL = 1_000
DIGITS = 60
POINTS = 6
"""Values of the variables at which expressions are compared; at three of them both must be defined."""
_LOST, _CANCELLED = 10**30, Fraction(1, 10**45)

_context = mpmath.mp.clone()
_context.dps = DIGITS

_TOKEN = re.compile(
    r"(?P<repeating>\d{0,400}\.\d{0,400}+\\(?:overline|bar|dot)\s?(?:\{\s?\d{1,400}+\s?\}|\d))"
    r"|(?P<number>\d++(?:\.\d++(?:[eE][-+]?\d++)?|[eE](?:\d++|[-+]\d\d++)|(?<=\b1)[eE][-+]\d)?|\.\d++)"
    r"|(?P<symbol>[A-Za-z]'{0,3}+)|(?P<command>\\[A-Za-z]++|\\.)|(?P<other>\S)",
    re.ASCII,
)
_MIXED = re.compile(r"(?<![\d.^_])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\d.])")
_CAPITALS = re.compile(r"(?<![A-Za-z\\])[A-Z]{2,}+(?![A-Za-z])")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[a-df-hj-z](?![A-Za-z])")
_GREEK = set(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "vartheta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "phi",
        "varphi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Sigma",
        "Phi",
        "Psi",
        "Omega",
        "hbar",
        "ell",
    ]
)
_ACCENTS = {"vec", "hat", "tilde", "dot", "ddot", "bar", "overline", "overrightarrow"}
_FUNCTIONS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "ln": "ln", "exp": "exp",
    "log": "log10", "lg": "log10",
}  # fmt: skip
_INVERSE = {"sin": "asin", "cos": "acos", "tan": "atan", "sinh": "asinh", "cosh": "acosh", "tanh": "atanh"}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}


class Unreadable(ValueError):
    """The expression is not understood, or too large to be evaluated."""


def values(latex: str) -> list[Any]:
    """Return the expression's values at the POINTS, None where it is undefined; just one if it has no variables."""
    try:
        reader = _Reader(latex)
        tree = reader.whole()
        points = range(POINTS if reader.variables else 1)
        return [_value_at(tree, reader.variables, point) for point in points]
    except (RecursionError, OverflowError, TypeError, AttributeError) as error:
        raise Unreadable(type(error).__name__) from None


def _value_at(tree: Any, variables: set[str], point: int) -> Any:
    known = {name: _sample(name, point) for name in variables}
    try:
        value = _bounded(_evaluate(tree, known))
    except (ZeroDivisionError, _context.NoConvergence):
        return None
    return value if _is_finite(value) else None


def _sample(name: str, point: int) -> Any:
    source = random.Random(f"{name} {point}")
    size = _context.mpf(source.randrange(10**17, 3 * 10**17)) / 10**17 - _context.mpf("0.61")
    return -size if point % 4 == 1 or (point % 4 == 3 and source.random() < 0.5) else size


class _Reader:
    """A recursive-descent reader: sums of products of powers, with products that are not written out."""

    def __init__(self, latex: str):
        if not _VARIABLE.search(latex):  # AB is a name of geometry, but the product of two variables in 3AB + x
            latex = _CAPITALS.sub(lambda match: rf"\name{match[0]} ", latex)
        latex = _MIXED.sub(r"\1\\frac{\2}{\3}", latex)
        self.tokens = [(match.lastgroup, match[0]) for match in _TOKEN.finditer(latex)] + [("end", "")]
        self.place = 0
        self.bars = 0
        self.variables: set[str] = set()

    def whole(self) -> Any:
        tree = self._sum()
        if self._next != "":
            raise Unreadable(self._next)
        return tree

    @property
    def _next(self) -> str:
        return self.tokens[self.place][1]

    @property
    def _kind(self) -> str:
        return self.tokens[self.place][0]

    def _take(self, *wanted: str) -> bool:
        taken = self._next in wanted and self._kind != "end"
        self.place += taken
        return taken

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise Unreadable(f"{self._next!r} instead of {token!r}")

    def _sum(self) -> Any:
        tree = self._product()
        while self._next in ("+", "-"):
            sign = self._next
            self.place += 1
            right = self._product()
            tree = ("+", tree, right if sign == "+" else ("-", right))
        return tree

    def _product(self) -> Any:
        if self._take("-"):
            return ("-", self._product())
        self._take("+")
        tree = self._power()
        while True:
            if self._take("*"):
                tree = ("*", tree, self._signed())
            elif self._take("/"):
                tree = ("/", tree, self._signed())
            elif self._begins_factor() or (self._kind == "number" and self.tokens[self.place - 1][1] == "!"):
                tree = ("*", tree, self._power())
            else:
                return tree

    def _signed(self) -> Any:
        return ("-", self._signed()) if self._take("-") else self._power()

    def _begins_factor(self) -> bool:
        if self._kind == "symbol" or self._next in ("(", "{", "[", r"\lfloor", r"\lceil"):
            return True
        name = self._next[1:]
        known = name in _GREEK | _ACCENTS | _FUNCTIONS.keys() or name.startswith("name")
        return (self._next == "|" and not self.bars) or (
            self._kind == "command" and (known or name in ("frac", "sqrt", "pi", "binom"))
        )

    def _power(self) -> Any:
        tree = self._atom()
        while self._next in ("!", "^", r"\degree"):
            if self._take(r"\degree"):
                tree = ("*", tree, ("/", ("pi",), Fraction(180)))
                continue
            if self._take("!"):
                tree = ("!", tree)
                if self._next == "!":
                    raise Unreadable("!!")
                continue
            self.place += 1
            exponent = self._argument(signed=True)
            if self._next == "^":
                raise Unreadable("x^y^z")
            tree = ("^", tree, exponent)
        return tree

    def _argument(self, signed: bool = False) -> Any:
        """An exponent, or an argument of \\frac and the like: braces, or one token, a digit of a longer number."""
        if signed and self._take("-"):
            return ("-", self._argument())
        if self._kind == "number" and self._next.isdecimal() and not signed:
            digits = self._next
            self.tokens[self.place] = ("number", digits[1:])
            self.place += len(digits) == 1
            return Fraction(digits[0])
        return self._atom()

    def _atom(self) -> Any:
        kind, token = self.tokens[self.place]
        self.place += 1
        if kind == "number":
            return self._number(token)
        if kind == "repeating":
            return _repeating(token)
        if kind == "symbol":
            return self._symbol(token)
        if kind == "command":
            return self._command(token[1:], token)
        if token in _CLOSING:
            tree = self._sum()
            self._expect(_CLOSING[token])
            return tree
        if token == "|" and not self.bars:
            self.bars += 1
            tree = self._sum()
            self.bars -= 1
            self._expect("|")
            return ("abs", tree)
        raise Unreadable(token)

    def _number(self, token: str) -> Any:
        mantissa, _, power = token.lower().partition("e")
        if len(mantissa) > MAX_BITS // 4 or len(power) > 5 or self._next == "_":
            raise Unreadable(token[:20])
        value = ("*", Fraction(mantissa), ("^", Fraction(10), Fraction(power))) if power else Fraction(mantissa)
        if self._kind == "number" or self._kind == "repeating":
            raise Unreadable("two numbers side by side")
        if self._next == r"\frac" and token.isdecimal():  # a mixed number
            return ("+", value, self._atom())
        return value

    def _symbol(self, token: str) -> Any:
        if token in ("e", "i") and self._next != "_":
            return (token,)
        name = token
        if self._take("_"):
            start = self.place
            if self._take("{"):
                while self._kind != "end" and not self._take("}"):
                    self.place += 1
            else:
                self.place += 1
            name += "_" + "".join(text for _, text in self.tokens[start : self.place] if text not in "{}")
        ahead = [text for _, text in self.tokens[self.place : self.place + 3]]
        is_function = ahead[0] == "(" and (name in ("f", "g", "h") or (name.isupper() and ahead[2] == ")"))
        if is_function or ("'" in name and ahead[0] == "("):
            raise Unreadable(f"{name}(")
        self.variables.add(name)
        return ("symbol", name)

    def _command(self, name: str, token: str) -> Any:
        if name == "frac":
            return ("/", self._argument(), self._argument())
        if name == "binom":
            return ("binom", self._argument(), self._argument())
        if name == "sqrt":
            index: Any = Fraction(2)
            if self._take("["):
                index = self._sum()
                self._expect("]")
            return ("root", self._argument(), index)
        if name == "pi":
            return ("pi",)
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("lfloor", "lceil"):
            tree = self._sum()
            self._expect(_CLOSING[token])
            return (name, tree)
        if name in _ACCENTS:
            start = self.place
            self._argument()
            return self._symbol(
                token + "".join(text for _, text in self.tokens[start : self.place] if text not in "{}")
            )
        if name in _GREEK or name.startswith("name"):
            return self._symbol(token)
        raise Unreadable(token)

    def _function(self, name: str) -> Any:
        function, base, exponent = _FUNCTIONS[name], None, None
        if name == "log" and self._take("_"):
            base = self._argument()
        if self._take("^"):
            exponent = self._argument(signed=True)
        if exponent == ("-", Fraction(1)) or exponent == Fraction(-1):
            function, exponent = _INVERSE.get(function, ""), None
            if not function:
                raise Unreadable(rf"\{name}^{{-1}}")
        argument = self._power() if self._next in ("(", "{", "[") else self._function_argument()
        tree = ("call", function, argument)
        if base is not None:
            tree = ("/", ("call", "ln", argument), ("call", "ln", base))
        return tree if exponent is None else ("^", tree, exponent)

    def _function_argument(self) -> Any:
        tree = self._signed()
        while self._begins_factor() and self._next[1:] not in _FUNCTIONS and self._next != "(":
            tree = ("*", tree, self._power())
        return tree


def _repeating(token: str) -> Fraction:
    plain, repeated = re.split(r"\\[a-z]+", token)
    repeated = repeated.strip("{} ")
    whole, _, tail = plain.partition(".")
    nines = 10 ** len(repeated) - 1
    return Fraction(int(whole or 0)) + (Fraction(int(tail or 0)) + Fraction(int(repeated), nines)) / 10 ** len(tail)


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
    """The value, unless its size is beyond MAX_BITS."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise Unreadable("too large to be evaluated")
    elif value and _is_finite(value) and abs(_context.mag(value)) > MAX_BITS:
        raise Unreadable("too large to be evaluated")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, Fraction) or bool(_context.isfinite(value))


def inexact(value: Any) -> Any:
    """Return a Fraction as a number of DIGITS digits."""
    return _context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _both(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(one: Any, other: Any) -> Any:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return operation(one, other)
        return operation(inexact(one), inexact(other))

    return apply


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    if not one or not other:
        return one or other
    one, other = inexact(one), inexact(other)
    small, large = sorted((abs(one), abs(other)))
    if large > small * _LOST:
        raise Unreadable("a sum of numbers of too different sizes")
    result = one + other
    return Fraction(0) if abs(result) < large * inexact(_CANCELLED) else result


def _raise(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        power = exponent.numerator
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(power) * (bits - (bits == 1)) > MAX_BITS and base not in (0, 1, -1):
                raise Unreadable("too large to be evaluated")
            return base ** (power % 2 if abs(base) == 1 else power)
        if abs(power) > MAX_BITS:
            raise Unreadable("too large to be evaluated")
        return base**power
    base, exponent = inexact(base), inexact(exponent)
    if not base:
        return base**exponent
    if abs(exponent) * (abs(_context.log(abs(base), 2)) + 5) > MAX_BITS:
        raise Unreadable("too large to be evaluated")
    return base**exponent


def _root(value: Any, index: Any) -> Any:
    if not isinstance(index, Fraction) or index.denominator != 1 or not 1 <= index <= MAX_FACTORIAL:
        return _raise(value, _both(lambda a, b: a / b)(Fraction(1), index))
    value = inexact(value)
    if index % 2 and not isinstance(value, _context.mpc) and value < 0:
        return -_context.root(-value, int(index))
    return _context.root(value, int(index))


def _call(name: str, value: Any) -> Any:
    value = inexact(value)
    if (_context.mag(value) > 12 and name in ("exp", "sinh", "cosh", "tanh")) or _context.mag(value) > 200:
        raise Unreadable("too large to be evaluated")
    if name in ("ln", "log10") and not value:
        raise ZeroDivisionError
    result = getattr(_context, name)(value)
    # Rounding of pi leaves sin(pi) a little above 0.
    return Fraction(0) if abs(result) < inexact(_CANCELLED) and name not in ("exp",) and abs(value) > 1e-30 else result


def _whole(value: Any) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise Unreadable("too large to be evaluated")
    return int(value)


def _factorial(value: Any) -> Any:
    if not isinstance(value, Fraction):
        return _context.gamma(_small(value) + 1)
    return Fraction(math.factorial(_whole(value)))


def _binomial(above: Any, below: Any) -> Any:
    if not (isinstance(above, Fraction) and isinstance(below, Fraction)):
        return _context.binomial(_small(inexact(above)), _small(inexact(below)))
    return Fraction(math.comb(_whole(above), _whole(below)))


def _small(value: Any) -> Any:
    if abs(value) > 50:
        raise Unreadable("too large to be evaluated")
    return value


def _rounded(name: str) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        floor = -(-value.numerator // value.denominator) if name == "ceil" else value.numerator // value.denominator
        return Fraction(floor)

    return apply


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
    "lfloor": _rounded("floor"),
    "lceil": _rounded("ceil"),
}
