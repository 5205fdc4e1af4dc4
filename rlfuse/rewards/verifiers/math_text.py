"""Normalise spellings of an expression (LaTeX variants, plain text, Unicode) in linear time."""

# ruff: noqa: RUF001
from __future__ import annotations

import re

_SPELLINGS = {
    spelling: to
    for to, spellings in {
        r"\frac": r"\dfrac \tfrac \cfrac", r"\binom": r"\dbinom \tbinom", r"\le ": r"\leq \leqslant ≤",
        r"\ge ": r"\geq \geqslant ≥", r"\neq ": r"\ne \not= ≠", "<": r"\lt", ">": r"\gt",
        "*": r"\cdot \times \ast × · ⋅ ∗", "/": r"\div ÷ ∕", r"\{": r"\lbrace", r"\}": r"\rbrace",
        "|": r"\lvert \rvert \vert \mid", r"\infty ": r"\infin ∞", r"\emptyset ": r"\varnothing ∅",
        r"\degree ": r"\degree \deg ° º", ":": r"\colon ∶", r"\pmod ": r"\bmod \mod", "...": r"\ldots \cdots \dots …",
        r"\pm ": "±", r"\cup ": "∪", r"\cap ": "∩", r"\in ": "∈", r"\sqrt ": "√", r"\pi ": "π",
        r"\mathbb{R}": r"ℝ \R \reals", r"\mathbb{Z}": r"ℤ \Z", "-": "– ‐", r"\text{euro}": r"\euro €",
        r"\text{pound}": r"\pounds £", r"\text{cent}": "¢", "%": r"\%", "#": r"\#", "&": r"\&", "_": r"\_", "^": "**",
    }.items()
    for spelling in spellings.split()
}  # fmt: skip
_GREEK = {
    "\u03b1": "alpha", "β": "beta", "\u03b3": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda",
    "μ": "mu", "\u00b5": "mu", "\u03bd": "nu", "\u03c1": "rho", "\u03c3": "sigma", "τ": "tau", "φ": "phi", "ψ": "psi",
    "ω": "omega", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_DROPPED = (
    r"\left", r"\right", r"\big", r"\Big", r"\bigg", r"\Bigg", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\displaystyle",
    r"\textstyle", r"\limits", r"\nolimits", r"\nonumber", r"\!", r"\(", r"\)", r"\[", r"\]", "\u200b",
)  # fmt: skip
_SPACES = (
    r"\,", r"\;", r"\:", "\\ ", r"\quad", r"\qquad", r"\enspace", r"\thinspace", "~", "\u00a0", "\u2009", "\u202f",
)  # fmt: skip
_SPELLINGS |= {letter: rf"\{name} " for letter, name in _GREEK.items()}
_SPELLINGS |= dict.fromkeys(_DROPPED, "") | dict.fromkeys(_SPACES, " ")
_SPELLED = re.compile(r"\\\\|\\[A-Za-z]++\.?|\\.|\*\*|[^\x00-\x7f]|~", re.DOTALL)
_VECTOR = re.compile(r"\\(?:vec|mathbf|boldsymbol|overrightarrow)")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]++"), re.compile("[₀₁₂₃₄₅₆₇₈₉]++")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")
_FRACTIONS = {ord(char): rf"\frac{{{over}}}{{{under}}}" for char, over, under in ("½12", "⅓13", "⅔23", "¼14", "¾34")}
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))")
_TEXT = re.compile(
    r"\\(?:text\w{0,6}|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|operatorname|rm|bf)\*?\s?\{([^{}]{0,300}+)\}"
)
_DEGREES = re.compile(r"\^\s?\{?\s?(?:\\circ|\\degree)\s?\}?|\\circ\b")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s?(?=\()")
_ROOT_OF = re.compile(r"\\sqrt\s?\(([^()]{1,100}+)\)")
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp"
_NAMED = re.compile(rf"(?<![\\A-Za-z])(pi|infty|{_FUNCTIONS})(?![a-zA-Z])")
_ORDINAL = re.compile(r"(?<=\d)\s?\^\s?\{?\s?(?:\\text\{)?\s?(st|nd|rd|th)\s?\}?\s?\}?")
_BRACED = re.compile(r"(?<=[\^_])\{\s?(\w|\\[a-z]{1,10})\s?\}")
_SPACE = re.compile(r"\s++")
_FREE_SPACE = re.compile(r"(?<![\d.]) | (?![\d.])")
_PUNCTUATION = re.compile(r"['.]")
_BARE_STYLE = re.compile(r"\\(?:math|text)(?:rm|bf|it|sf|tt)\s([A-Za-z])(?![A-Za-z])")
_OLD_STYLE = re.compile(r"\{\s?\\(?:rm|bf|it)\s([^{}]{1,100}+)\}")


def canonical(text: str) -> str:
    """Return the expression in canonical spelling, with collapsed white space and text in `\\text{}`."""
    text = _currency(text)
    if _VECTOR.search(text):  # a cross product is not a product of numbers
        text = text.replace(r"\times", r"\cross ")
    text = _GROUPED.sub("", text).translate(_FRACTIONS)
    for scripts, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        text = scripts.sub(lambda match, mark=mark: f"{mark}{{{match[0].translate(_DIGITS)}}}", text)
    text = _DEGREES.sub(r"\\degree ", _ORDINAL.sub(r"\\text{\1}", text))
    text = _BARE_STYLE.sub(r" \1 ", _OLD_STYLE.sub(r"\\text{\1}", text))
    text = _TEXT.sub(_plain_text, text)
    text = _SPELLED.sub(_respelled, text)
    text = _NAMED.sub(r"\\\1 ", _ROOT.sub(r"\\sqrt", text))
    text = _BRACED.sub(r"\1", _ROOT_OF.sub(r"\\sqrt{\1}", text))
    text = _SPACE.sub(" ", text.replace("{:}", ":")).strip().removeprefix("+")
    return text if text.endswith("...") else text.rstrip(".,; ")


def key(canonical_text: str) -> str:
    """Return a comparison key: the canonical text without irrelevant white space, and words in lower case."""
    return words_of(canonical_text) or _FREE_SPACE.sub("", canonical_text)


def words_of(canonical_text: str) -> str:
    """Return the case-folded words if the text consists of words, else "" (for instance for x or AB)."""
    plain = _PUNCTUATION.sub("", canonical_text.replace(r"\text{", " ").replace("}", " "))
    letters = "".join(plain.replace("-", " ").split())
    is_long = any(len(word) > 2 for word in plain.replace("-", " ").split()) and len(letters) > 3
    is_text = is_long or letters.casefold() in ("yes", "no") or canonical_text.startswith(r"\text{")
    return " ".join(plain.casefold().split()) if is_text and letters.isalpha() and not letters.isupper() else ""


def _currency(text: str) -> str:
    """Replace currency dollar signs by \\text{dollar}; remove math delimiters."""
    text = text.replace(r"\$", r"\text{dollar} ")
    if text.count("$") % 2 and not text.count("$$"):
        text = text.replace("$", r"\text{dollar} ", 1)
    return text.replace("$", "")


def _plain_text(match: re.Match[str]) -> str:
    content = " ".join(match[1].split())
    if content in _FUNCTIONS.split("|"):
        return rf"\{content} "
    bare = content.strip("(). ")
    if len(bare) == 1 or not any(character.isalpha() for character in content):
        return f" {bare if len(bare) == 1 else content} "
    return rf" \text{{{content}}} "


def _respelled(match: re.Match[str]) -> str:
    token = match[0]
    if token in (r"\left.", r"\right."):  # an invisible bracket
        return ""
    command = token.rstrip(".") or token
    return _SPELLINGS.get(command, command) + token[len(command) :]
