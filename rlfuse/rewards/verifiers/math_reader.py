"""Parse canonical LaTeX (`math_text`) into a tree: a Fraction, or a tuple of an operator and its operands.

Other expressions raise UnsupportedExpression: f(x), integrals, numbers in other bases.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

MAX_DIGITS = 2_500

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
    re.findall(
        r"\w+",
        """
        alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho
        sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega hbar ell
        """,
    )
)
_ACCENTS = {"vec", "hat", "tilde", "dot", "ddot", "bar", "overline", "overrightarrow"}
_FUNCTIONS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "ln": "ln", "exp": "exp",
    "log": "log10", "lg": "log10",
}  # fmt: skip
_INVERSE = {"sin": "asin", "cos": "acos", "tan": "atan", "sinh": "asinh", "cosh": "acosh", "tanh": "atanh"}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_FACTORS = _GREEK | _ACCENTS | _FUNCTIONS.keys() | {"frac", "sqrt", "pi", "binom"}
_OPEN = ("(", "{", "[", r"\lfloor", r"\lceil")


class UnsupportedExpression(ValueError):
    """The expression is not supported, or too large to be evaluated."""


def read(latex: str) -> tuple[Any, set[str]]:
    """Return the tree of an expression and the names of its variables."""
    reader = _Reader(latex)
    try:
        return reader.whole(), reader.variables
    except RecursionError:
        raise UnsupportedExpression("nested too deeply") from None


class _Reader:
    """Recursive-descent parser: sums of products of powers, with implicit products."""

    def __init__(self, latex: str):
        if not _VARIABLE.search(latex):  # AB is a geometric name, but a product of two variables in 3AB + x
            latex = _CAPITALS.sub(lambda match: rf"\name{match[0]} ", latex)
        latex = _MIXED.sub(r"\1\\frac{\2}{\3}", latex)
        self.tokens = [(match.lastgroup, match[0]) for match in _TOKEN.finditer(latex)] + [("end", "")]
        self.place = 0
        self.bars = 0
        self.variables: set[str] = set()

    def whole(self) -> Any:
        tree = self._sum()
        if self._next != "":
            raise UnsupportedExpression(self._next)
        return tree

    @property
    def _next(self) -> str:
        return self.tokens[self.place][1]

    @property
    def _kind(self) -> str:
        return self.tokens[self.place][0]

    def _take(self, *tokens: str) -> bool:
        taken = self._next in tokens and self._kind != "end"
        self.place += taken
        return taken

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise UnsupportedExpression(f"{self._next!r} instead of {token!r}")

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
        name = self._next[1:]
        is_command = self._kind == "command" and (name in _FACTORS or name.startswith("name"))
        return is_command or self._kind == "symbol" or self._next in _OPEN or (self._next == "|" and not self.bars)

    def _power(self) -> Any:
        tree = self._atom()
        while self._next in ("!", "^", r"\degree"):
            if self._take(r"\degree"):
                tree = ("*", tree, ("/", ("pi",), Fraction(180)))
                continue
            if self._take("!"):
                tree = ("!", tree)
                if self._next == "!":
                    raise UnsupportedExpression("!!")
                continue
            self.place += 1
            exponent = self._argument(signed=True)
            if self._next == "^":
                raise UnsupportedExpression("x^y^z")
            tree = ("^", tree, exponent)
        return tree

    def _argument(self, signed: bool = False) -> Any:
        """Read an exponent or an argument of \\frac: braces, or one token; of a longer number, one digit."""
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
        raise UnsupportedExpression(token)

    def _number(self, token: str) -> Any:
        mantissa, _, power = token.lower().partition("e")
        if len(mantissa) > MAX_DIGITS or len(power) > 5 or self._next == "_":
            raise UnsupportedExpression(token[:20])
        value = ("*", Fraction(mantissa), ("^", Fraction(10), Fraction(power))) if power else Fraction(mantissa)
        if self._kind == "number" or self._kind == "repeating":
            raise UnsupportedExpression("two adjacent numbers")
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
            elif self._kind == "end":
                raise UnsupportedExpression("_")
            else:
                self.place += 1
            name += "_" + "".join(text for _, text in self.tokens[start : self.place] if text not in "{}")
        ahead = [text for _, text in self.tokens[self.place : self.place + 3]]
        is_function = ahead[0] == "(" and (name in ("f", "g", "h") or (name.isupper() and ahead[2] == ")"))
        if is_function or ("'" in name and ahead[0] == "("):
            raise UnsupportedExpression(f"{name}(")
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
        raise UnsupportedExpression(token)

    def _function(self, name: str) -> Any:
        function, base, exponent = _FUNCTIONS[name], None, None
        if name == "log" and self._take("_"):
            base = self._argument()
        if self._take("^"):
            exponent = self._argument(signed=True)
        if exponent == ("-", Fraction(1)) or exponent == Fraction(-1):
            function, exponent = _INVERSE.get(function, ""), None
            if not function:
                raise UnsupportedExpression(rf"\{name}^{{-1}}")
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
