"""Score a multiple-choice answer: a letter, or the text of an option.

The letter is taken from the last box, else from the last announcement, the last line or the first line. A letter before
other words is a word ("A dog"). Two letters, or a letter with the text of another option, are no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import (
    Parts,
    announced_answer,
    answer_in,
    ground_truth_error,
    normalize_width,
    not_found,
    parts_of,
    strip_markup,
    strip_wrapping,
    verdict,
    wrong_answer,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_CHARS = 1_000

_LEADING = re.compile(
    r"""(?:(?:the|it['\u2019]s|it|that|this|is|must|be|would|most|likely|definitely|clearly|correct|right|best|final|my|
            option|choice|answer|letter)\b[\s:]{1,3}+){0,6}+
        (?: [(\[{]\s?(?P<bracketed>[A-Z])\s?[)\]}] | (?P<alone>[A-Z])$
          | (?P<marked>[A-Z])(?:\s?[).:!]|\s[-\u2013\u2014])(?=\s|$) | (?P<bare>[A-Z])(?=[\s,;]) )
        (?P<rest>.*)""",
    re.IGNORECASE | re.DOTALL | re.ASCII | re.VERBOSE,
)
_AFTER_BARE = re.compile(
    r"\s?(?:[,;(-]|(?:because|since|as|for|which)\b|is\s(?:the\s|my\s)?(?:most\s)?(?:correct|right|best|true|likely|answer))"
)
_SECOND = re.compile(
    r"\s?(?:,\s?(?:or\s|and\s)?|/|&\s?|or\s|and\s)(?:maybe\s|perhaps\s|possibly\s|also\s)?(?:option\s)?[(\[]?[B-HJ-Z](?!\w)"
    r"|\s?(?:or|and|/|&)\s?(?:option\s)?[(\[]?[AI](?:[)\].:,;]|\s|$)"
    r"|\s?(?:option\s)?[(\[]?[B-HJ-Z](?:[)\].:;]|$)"
)
_RETRACTED = re.compile(
    r"\b(?i:wait|no[,.]|but|actually|instead|rather|however|sorry)(?!\w)[^\n]{0,60}?(?<!\w)[(\[]?[A-Z](?=[)\].:,;\s]|$)"
)
_LISTED = re.compile(r"\W{0,4}([A-Z])\s?[).:]\s")
_NAMED = re.compile(r"(?<!\w)[A-Z](?!\w)")
_LETTERED = re.compile(r"\s[(\[](?P<letter>[A-Z])[)\]]$")


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    options: Sequence[str] | dict[str, str] | str | None = None,
) -> dict[str, Any]:
    """Return 1 for the right option, else 0.

    `options` (or `extra_info["options"]`): list of texts or dict from letter to text, also as JSON. Without options
    only letters are accepted.
    """
    texts = _options(options if options is not None else (extra_info or {}).get("options"))
    truth = _letter_of_truth(ground_truth, texts)
    answer = answer_in(solution_str)
    if not answer:
        return not_found(answer, "choice")
    parts = parts_of(answer)
    letter = _stated(parts, texts) if parts else None
    if letter is None:
        return not_found(answer, f"choice of {', '.join(texts)}" if texts else "letter")
    return verdict(1.0, pred=letter) if letter == truth else wrong_answer(letter, truth)


def _stated(parts: Parts, texts: dict[str, str]) -> str | None:
    lines = strip_wrapping(parts.text).splitlines() or [""]
    listed = {match[1] for line in lines if (match := _LISTED.match(line))}
    outer = [] if len(listed) > 1 else [lines[-1], lines[0]]  # a list of several options is not a choice
    places = [parts.box, parts.announced_answer, *outer]
    if parts.box is not None and _NAMED.search(parts.box[:_MAX_CHARS]):
        places = [parts.box, announced_answer(parts.box)]  # a letter in the box takes precedence
    for place in places:
        letter = _choice(place, texts) if place else None
        if letter is not None:
            return letter
    return None


def _options(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    try:
        texts = json.loads(given) if isinstance(given, str) else given
        if not isinstance(texts, dict):
            texts = dict(zip(LETTERS[: len(texts)], texts, strict=True))
    except (ValueError, TypeError):
        texts = {}
    # Parquet fills missing letters of a row with None.
    found = {str(letter).upper(): normalize_width(str(text)) for letter, text in texts.items() if text is not None}
    if not found or not all(len(letter) == 1 and letter in LETTERS for letter in found):
        raise ValueError(
            f"options: got {given!r}; it must be a list of up to 26 texts or a dict from letter to text, also as JSON"
        )
    return found


def _letter_of_truth(ground_truth: Any, texts: dict[str, str]) -> str:
    truth = strip_wrapping(normalize_width(ground_truth)) if isinstance(ground_truth, str) else ""
    by_text = [letter for letter, text in texts.items() if _plain(text) == _plain(truth)]
    letter = by_text[0] if len(by_text) == 1 else _choice(truth, texts)
    if letter is None:
        raise ground_truth_error(ground_truth, f"one of {texts}, or its letter" if texts else "a letter from A to Z")
    return letter


def _choice(place: str, texts: dict[str, str]) -> str | None:
    plain = _plain(place)
    named = [letter for letter, option in texts.items() if _plain(option) == plain]
    if len(named) == 1:
        return named[0]
    text = strip_markup(strip_wrapping(place[:_MAX_CHARS])).strip()
    lettered = _LETTERED.search(text)
    if lettered and not _NAMED.search(text[: lettered.start()]):  # Paris (B)
        text = f"({lettered['letter']}) {text[: lettered.start()]}"
    match = _LEADING.match(text)
    if match is None:
        return None
    rest = match["rest"]
    letter = match["bracketed"] or match["marked"] or match["alone"] or match["bare"]
    if match["bare"] and (letter.islower() or not _AFTER_BARE.match(rest)):
        return None
    letter, option = letter.upper(), _plain(rest.strip(" -\u2013\u2014:).]"))
    if letter not in (texts or LETTERS):
        return None
    if option in {_plain(text) for text in texts.values()}:
        return letter if option == _plain(texts[letter]) else None
    return None if any(search(rest) for search in (_SECOND.match, _RETRACTED.search)) else letter


def _plain(text: str) -> str:
    return " ".join(strip_markup(strip_wrapping(text)).split()).rstrip(".").casefold()
