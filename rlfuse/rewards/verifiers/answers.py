r"""Extract the final answer of a response, and build the result dict of all verifiers. Pure.

Time is linear in the length of the response. Responses longer than MAX_CHARS have no answer, nor have truncated ones
whose last `\boxed{` or `<answer>` is not closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from rlfuse.rewards.reasoning_tags import answer_after_reasoning

Found = TypeVar("Found")
MAX_CHARS = 100_000
MAX_SHOWN_CHARS = 60
_LAYERS = 12
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3000: " ", 0x2212: "-"}
_TAG = re.compile(r"<(/?)(answer|final[_ ]answer)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\b")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GAP = r"[\s*_`\"]{0,4}+"
_NOUN = r"(?:answers?|ans|option|choice|final\s(?:result|solution|value)|my\spick)"
_VERB = r"(?:is|are|was|(?:would|should|must|will)\sbe|equals|lautet|ist|est|es|[eé]|è|是|为|為|は|은|는)"
_OTHER_LANGUAGES = (
    r"(?:final\s)?(?:réponses?(?:\sfinale)?|antwort(?:en)?|respuestas?(?:\sfinal)?|respostas?(?:\sfinal)?"
    r"|rispost[ae](?:\sfinale)?|ответ|відповідь|odpowiedź|antwoord|svar|cevap|đáp\sán|उत्तर|الإجابة|الجواب)"
    r"(?:\s(?:correct[ae]?|corrett[ae]|correcte|exacte|richtige|finale?))?"
)
_ANNOUNCEMENT = re.compile(
    rf"""\b(?:{_NOUN}|{_OTHER_LANGUAGES})(?:\(s\))?{_GAP}(?:{_VERB}(?=[\s:*_`$"'(\[\\]|$)(?!\snot\b)|:|=|->|[→≈—-](?=\s))
    | (?:最终|最終|正确|正確)?(?:答案|答え|正解|정답|答){_GAP}(?:{_VERB}|[:=→]|选|選)
    | (?:选择?|選択?)(?=\s?[A-Z](?![a-z]))
    | \b(?:I|we)(?:['\u2019](?:d|ll|m)|\s(?:would|will|must|should|am))?
      \s(?:go(?:ing)?\swith|opt\sfor|settle\s(?:on|for))\b
    | \b(?:I|we)(?:['\u2019](?:d|ll)|\s(?:would|will|must|should))?\s(?:choose|chose|pick|select)(?:ed)?\b
      (?=\s(?:option|answer|choice|[*_`"'(\[]{{0,3}}+[A-Z]\b))
    | ^[#*_>\ ]{{1,8}}+(?:the\s)?(?:final\s)?(?:answer|{_OTHER_LANGUAGES})[*_\ ]{{0,3}}+$
    | ^\#\#\#\#(?=\ ?-?[$\\.\d])
    """,
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
_EMPHASIS_END = re.compile(r"\A[*_`]{1,3}+:?(?=\s)")
_LAST_EMPHASIS = re.compile(r"\*\*(?=[.,;:!]?$)")
_SYMMETRIC = ("```", "**", "__", "$$", "*", "_", "`", "$", '"', "'")
_PAIRS = (
    (r"\(", r"\)"), (r"\[", r"\]"), ("\u201c", "\u201d"), ("\u201e", "\u201c"), ("\u2018", "\u2019"), ("«", "»"),
    ("「", "」"), ("『", "』"),
)  # fmt: skip
_COMMAND = re.compile(r"\\(?:boxed|fbox|framebox|text\w{0,6}|math(?:rm|bf|it|sf|tt|normal)|mbox|displaystyle)\s?\{")
_MARKUP = re.compile(
    r"\\(?:text\w{0,6}|math\w{2}|mbox)\s?\{([^{}]{0,200}+)\}|[*`\"\u201c\u201d$]|\\[()\[\]]|\\(?:left|right)(?![a-z])"
)
_ELEMENT = re.compile(r"<([A-Za-z_]\w{0,20})>")
_LEADING = re.compile(
    r"#{1,6}\s|>\s|[-*+•]\s(?![\d.\s])|\\displaystyle\b|(?:so|thus|hence|therefore)\b[,:]?\s", re.IGNORECASE
)
_TRAILING = " \t\r\n.,;:。、"
_FENCE = re.compile(r"\s{0,12}+(`{3,}+|~{3,}+)[ \t]{0,4}+([\w+#.-]{0,20}+)[ \t]{0,4}+$")

_BEFORE_NOUN = {
    f"{article}{adjective}".strip()
    for article in ("", "the ", "my ", "la ", "die ", "el ", "so the ", "so, the ", "thus, the ", "therefore, the ")
    for adjective in ("", "final", "correct", "right", "best")
}


class Parts(NamedTuple):
    """Parts of a response that may state its answer, in order of precedence.

    They are the last box, the text after the last announcement ("the answer is"), both unwrapped, and the whole text;
    all within the last `<answer>` tag if there is one (`is_tagged`).
    """

    box: str | None
    announced_answer: str | None
    text: str
    is_tagged: bool

    @property
    def stated(self) -> str:
        return self.box or self.announced_answer or strip_wrapping(self.text)


def answer_in(solution_str: str) -> str | None:
    """Return the response without its reasoning, in ASCII width; None if it is longer than MAX_CHARS."""
    answer = answer_after_reasoning(solution_str)
    return normalize_width(answer) if len(answer) <= MAX_CHARS else None


def normalize_width(text: str) -> str:
    """Return the text with full-width characters and minus signs as ASCII."""
    return text.translate(_FULL_WIDTH)


def parts_of(answer: str) -> Parts | None:
    """Return the parts that may state the answer; None if the text is empty or its last tag or box is not closed."""
    text, tags = answer, list(_TAG.finditer(answer))
    if tags:
        last = max((index for index, tag in enumerate(tags) if not tag[1]), default=-1)  # -1: the prompt opened it
        if last == len(tags) - 1:
            return None
        text = answer[tags[last].end() if last >= 0 else 0 : tags[last + 1].start()].strip()
    in_box, after = boxed(text), announced_answer(text)
    if not text or (in_box is None and _BOX.search(text)):
        return None
    return Parts(*(None if part is None else strip_wrapping(part) for part in (in_box, after)), text, bool(tags))


def read_from(answer: str, find: Callable[..., Found | None]) -> Found | None:
    """Apply `find` to the last box, else to the part after the last announcement, else to the whole text."""
    parts = parts_of(answer)
    if parts is None or parts.box is not None:
        return find(parts.box) if parts else None
    return (find(parts.announced_answer, first=True) if parts.announced_answer else None) or find(parts.text)


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None if there is none or it is not closed."""
    start = max((match.end() for match in _BOX.finditer(text)), default=None)
    if start is None:
        return None
    rest = text[start:].lstrip()
    if not rest.startswith("{"):  # \boxed 5, as in MATH
        return rest.partition("\n")[0].partition("$")[0].strip() or None
    end = _closing(rest)
    return None if end is None else rest[1:end].strip()


def _closing(text: str) -> int | None:
    depth = 0
    for match in _BRACE.finditer(text):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0 and match[0] == "}":
            return match.start()
    return None


def announced_answer(text: str) -> str | None:
    """Return the text after the last "answer is", "Final answer:", "答案" and so on, or None.

    That is the rest of the line, the next line if the rest is empty, or a displayed formula.
    """
    end = max((match.end() for match in _ANNOUNCEMENT.finditer(text)), default=None)
    if end is None:
        return None
    rest = _after_announcement(text[end:])
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$")):
        if rest.startswith(opening):
            return rest[2:].partition(closing)[0].strip() or None
    line = rest.partition("\n")[0].strip()
    if line.count("**") % 2:  # half of an emphasis that includes the announcement
        line = line.removeprefix("**") if line.startswith("**") else _LAST_EMPHASIS.sub("", line)
    if line.endswith("}") and "{" not in line:  # {"answer": "B"}
        line = line[:-1]
    return line.strip() or None


def _after_announcement(text: str) -> str:
    return _EMPHASIS_END.sub("", text.lstrip(" :="), count=1).lstrip(" \t\n:=")


def strip_wrapping(text: str) -> str:
    """Return the text without enclosing tags, emphasis, quotes, delimiters and trailing punctuation."""
    text = text.strip()
    for _ in range(_LAYERS):
        inner = _strip_layer(text)
        if inner == text:
            break
        text = inner
    return text


def _strip_layer(text: str) -> str:
    for mark in _SYMMETRIC:
        inner = text[len(mark) : -len(mark)]
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark) and mark not in inner:
            blocks = fenced_blocks(text) if mark == "```" else []
            return blocks[0][1] if blocks else inner.strip()
    for opening, closing in _PAIRS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and opening not in inner:
            return inner.strip()
    if command := _COMMAND.match(text):
        brace = command.end() - 1
        if _closing(text[brace:]) == len(text) - brace - 1:
            return text[brace + 1 : -1].strip()
    if (element := _ELEMENT.match(text)) and text.endswith(f"</{element[1]}>"):
        return text[element.end() : -len(element[1]) - 3].strip()
    if leading := _LEADING.match(text):
        return text[leading.end() :].strip()
    lead = _ANNOUNCEMENT.search(text, 0, 80)
    if lead and text[: lead.start()].strip(" *_#").casefold() in _BEFORE_NOUN:
        return (announced_answer(text) if "\n" not in text else _after_announcement(text[lead.end() :])) or text
    return text if text.endswith(("...", "…")) else text.rstrip(_TRAILING)


def strip_markup(text: str) -> str:
    r"""Return the text without emphasis, quotes and math delimiters, with \text{...} replaced by its content."""
    return _MARKUP.sub(r"\1", text)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of each closed code block, paired as in CommonMark."""
    blocks, fence, language, content = [], "", "", []
    for line in text.splitlines():
        match = _FENCE.match(line)
        if not fence and match:
            fence, language, content = match[1], match[2].lower(), []
        elif fence and match and match[1].startswith(fence) and not match[2]:
            blocks.append((language, "\n".join(content)))
            fence = ""
        elif fence:
            content.append(line)
    return blocks


def verdict(
    score: float, reason: str = "", *, right: bool | None = None, found: bool = True, pred: Any = None
) -> dict[str, Any]:
    """Return the result dict of a verifier. Pass `right` (the `acc`) if the score is not just 0 or 1.

    `pred`: the answer for majority votes; equivalent answers should be equal.
    """
    accurate = bool(score) if right is None else right
    result = {"score": float(score), "acc": float(accurate), "format": float(found)}
    return result | ({"reason": reason} if reason else {}) | ({} if pred is None else {"pred": str(pred)})


def not_found(answer: str | None, expected: str) -> dict[str, Any]:
    """Return the result for a response without an answer of the expected kind; `answer` None: too long."""
    if answer is None:
        return verdict(0.0, f"the answer is longer than {MAX_CHARS} characters", found=False)
    return verdict(0.0, f"no {expected} in {excerpt(answer)}", found=False)


def wrong_answer(found: Any, truth: Any) -> dict[str, Any]:
    """Return the result for a wrong answer."""
    return verdict(0.0, f"answered {excerpt(found)}, expected {excerpt(truth)}", pred=found)


def overlap_result(overlap: float, threshold: float, given: str, true: str) -> dict[str, Any]:
    """Return the result for an answer whose overlap (IoU) counts as right from `threshold` on."""
    right = overlap >= threshold
    return verdict(overlap, "" if right else f"answered {given}, expected {true}", right=right)


def ground_truth_error(ground_truth: Any, valid: str) -> ValueError:
    """Return the error for a ground truth that cannot be parsed."""
    return ValueError(f"ground_truth: got {ground_truth!r:.500}; it must be {valid}. Correct the row.")


def excerpt(value: Any) -> str:
    """Return the end of repr(value), where an answer usually is, for a message."""
    try:
        text = repr(value)
    except ValueError:  # above Python's limit for conversion
        text = "an integer of more than 4,300 digits"
    return text if len(text) <= MAX_SHOWN_CHARS else "..." + text[-MAX_SHOWN_CHARS:]
