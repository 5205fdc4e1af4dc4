r"""Split quantities (`5 \text{ cm}`, `90^\circ`, `\$18.90`, `12 apples`) into value and unit, and compare units.

An unknown word is a separate unit: 3 apples differ from 3 oranges.
"""

from __future__ import annotations

import re
from fractions import Fraction

Dimensions = dict[str, int]
Unit = tuple[Fraction, Dimensions]

_PREFIXES = {
    "p": -12, "n": -9, r"\mu": -6, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9, "T": 12,
    "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "kilo": 3, "mega": 6, "giga": 9,
}  # fmt: skip
_JOULE, _NEWTON = {"kg": 1, "m": 2, "s": -2}, {"kg": 1, "m": 1, "s": -2}
_VOLT = {"kg": 1, "m": 2, "s": -3, "A": -1}
# (symbol, names, value in base units, dimensions)
_METRIC: list[tuple[str, str, str, Dimensions]] = [
    ("m", "meter metre", "1", {"m": 1}), ("g", "gram gramme", "1/1000", {"kg": 1}), ("s", "second", "1", {"s": 1}),
    ("A", "ampere amp", "1", {"A": 1}), ("K", "kelvin", "1", {"K": 1}), ("mol", "mole", "1", {"mol": 1}),
    ("L", "liter litre", "1/1000", {"m": 3}), ("l", "", "1/1000", {"m": 3}), ("N", "newton", "1", _NEWTON),
    ("J", "joule", "1", _JOULE), ("W", "watt", "1", _JOULE | {"s": -3}), ("Pa", "pascal", "1", _NEWTON | {"m": -1}),
    ("Hz", "hertz", "1", {"s": -1}), ("C", "coulomb", "1", {"A": 1, "s": 1}), ("V", "volt", "1", _VOLT),
    (r"\Omega", "ohm", "1", _VOLT | {"A": -2}), ("F", "farad", "1", {"kg": -1, "m": -2, "s": 4, "A": 2}),
    ("T", "tesla", "1", {"kg": 1, "s": -2, "A": -1}), ("Wb", "weber", "1", _JOULE | {"A": -1}),
    ("H", "henry", "1", _JOULE | {"A": -2}), ("eV", "electronvolt", "1602176634/10000000000000000000000000000", _JOULE),
    ("cal", "calorie", "4184/1000", _JOULE), ("B", "byte", "8", {"bit": 1}), ("bit", "", "1", {"bit": 1}),
]  # fmt: skip
# (names, value in base units, dimensions). Units without conversion are dimensions themselves.
_OTHER: list[tuple[str, str, Dimensions]] = [
    ("min minute", "60", {"s": 1}), ("h hr hour", "3600", {"s": 1}), ("sec", "1", {"s": 1}),
    ("day d", "86400", {"s": 1}), ("week wk", "604800", {"s": 1}), ("year yr", "1", {"year": 1}),
    ("month", "1", {"month": 1}), ("in inch inches", "254/10000", {"m": 1}), ("ft foot feet", "3048/10000", {"m": 1}),
    ("yd yard", "9144/10000", {"m": 1}), ("mi mile", "1609344/1000", {"m": 1}),
    ("mph", "44704/100000", {"m": 1, "s": -1}), ("kph", "5/18", {"m": 1, "s": -1}), ("acre", "1", {"acre": 1}),
    ("hectare ha", "10000", {"m": 2}), ("cc", "1/1000000", {"m": 3}), ("gal gallon", "1", {"gallon": 1}),
    ("atm atmosphere", "101325", _NEWTON | {"m": -1}), ("bar", "100000", _NEWTON | {"m": -1}),
    ("lb lbs pound", "1", {"pound": 1}), ("oz ounce", "1", {"ounce": 1}), ("ton tonne t", "1000", {"kg": 1}),
    ("dollar usd buck", "1", {"dollar": 1}), ("cent", "1/100", {"dollar": 1}), ("euro eur", "1", {"euro": 1}),
    ("unit", "1", {}), ("rad radian", "1", {"rad": 1}), (r"\degree degree deg", "1", {"degree": 1}),
    ("% percent pct", "1/100", {"percent": 1}), ("st nd rd th", "1", {"ordinal": 1}), ("am", "1", {"am": 1}),
    ("pm", "1", {"pm": 1}),
]  # fmt: skip


def _table() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    for symbol, names, value, dimensions in _METRIC:
        for prefix, power in {**_PREFIXES, "": 0}.items():
            is_spelled_out = prefix.isalpha() and len(prefix) > 2
            words = names.split() if is_spelled_out else [symbol, *([] if prefix else names.split())]
            table.update({prefix + word: (Fraction(value) * Fraction(10) ** power, dimensions) for word in words})
    for names, value, dimensions in _OTHER:
        table.update({name: (Fraction(value), dimensions) for name in names.split()})
    return table


_UNITS = _table()
_ITEM = re.compile(
    r"(?P<word>[kMGm]?\\Omega\b|\\degree\b(?:\s?[CF]\b)?|\\mu\s?[A-Za-z]{1,3}|[A-Za-z]{1,40}+|%)"
    r"(?:\s?(?:\^\s?\{?\s?(?P<power>-?\d)\s?\}?|(?P<digit>[23])(?![\d.])))?|(?P<operator>/|\*)|(?P<bracket>[()])"
)
_TEXT = re.compile(r"\\text\{([^{}]{0,300}+)\}")
_LETTER = re.compile(r"(?<![A-Za-z\\])(?!(?<=\d)[eE][-+]?\d)[A-Za-z]|\\text\{|\\degree|\\Omega|\\mu|%")
_SQUARED = re.compile(r"\s(squar|cub)ed\b")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NOT_UNITS = {"or", "and", "not", "because", "if", "when", "where", "to", "is", "are"}


def quantity(text: str) -> tuple[str, str]:
    """Split a canonical expression into (value, unit); the unit is "" if there is none."""
    if (front := _TEXT.match(text)) and unit_of(front[1]):  # \text{dollar} 18.90
        return text[front.end() :].strip(), front[1]
    if (letter := _LETTER.search(text)) is None:
        return text, ""
    value, tail = text[: letter.start()], text[letter.start() :]
    if _FUNCTION.search(value):  # degrees belong to the angle in a function
        return text, ""
    if not any(character.isdigit() for character in value) and r"\pi" not in value:
        return text, ""
    unit = " ".join(_TEXT.sub(r" \1 ", tail).split())
    if value.rstrip().endswith(("*", "/")):
        unit = f"/{unit}" if value.rstrip().endswith("/") else unit
        value = value.rstrip()[:-1]
    # 5m and 3x are products; 5 m, 5cm and \text{m} are quantities.
    certain = tail.startswith(("\\", "%")) or value.endswith(" ") or len(unit) > 1
    words = unit.split()
    noun = all(word.isalpha() and len(word) > 2 and word not in _NOT_UNITS for word in words) and value.endswith(" ")
    if value.strip() and certain and (unit_of(unit) or noun or (r"\text{" in tail and not any(map(str.isdigit, unit)))):
        return value.strip(), unit
    return text, ""


def unit_of(text: str) -> Unit | None:
    """Return (value in base units, dimensions) of a unit, or None if it is unknown."""
    scale, dimensions, sign, power, grouped, end = Fraction(1), dict[str, int](), 1, 1, False, 0
    text = _SQUARED.sub(lambda match: "^2" if match[1] == "squar" else "^3", text.replace(".", ""))
    for item in _ITEM.finditer(text):
        if text[end : item.start()].strip():
            return None
        end = item.end()
        if item["operator"] == "/" or item["word"] == "per":
            sign = -1  # of the next unit, or of all units in the next brackets
        elif item["bracket"]:
            grouped = item["bracket"] == "("
            sign = sign if grouped else 1
        elif item["operator"]:
            continue
        elif item["word"].lower() in _POWERS:
            power = _POWERS[item["word"].lower()]
        else:
            known = _known(item["word"])
            if known is None:
                return None
            exponent = sign * power * int(item["power"] or item["digit"] or 1)
            scale *= known[0] ** exponent
            for name, size in known[1].items():
                dimensions[name] = dimensions.get(name, 0) + size * exponent
            power, sign = 1, sign if grouped else 1
    if text[end:].strip() or not end:
        return None
    return scale, {name: size for name, size in dimensions.items() if size}


def _known(word: str) -> Unit | None:
    word = word.replace(r"\mu ", r"\mu")
    if word.startswith(r"\degree") and len(word) > len(r"\degree"):
        return Fraction(1), {word[-1] + " degree": 1}
    lower = word.lower()
    for name in (word, lower if len(word) > 2 else word, lower[:-1] if lower.endswith("s") and len(word) > 3 else word):
        if name in _UNITS:
            return _UNITS[name]
    return None


def conversion_factor(one: str, other: str) -> Fraction | None:
    """Return the factor that converts `one` to `other`, or None if their dimensions differ."""
    units = unit_of(one), unit_of(other)
    if units[0] and units[1]:
        return units[0][0] / units[1][0] if units[0][1] == units[1][1] else None
    return Fraction(1) if _noun(one) == _noun(other) else None


def _noun(text: str) -> str:
    return " ".join(word.removesuffix("s") for word in text.casefold().replace(".", "").split())
