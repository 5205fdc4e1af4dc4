"""Find the words that a shell script passes to a command, as far as they are known without running it.

Resolves assignments, arrays, defaults (`${A:-b}`), integer arithmetic and quotes; anything else stays as `$NAME`.
Comments between continued lines are treated as comments. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

CLOSING = {"(": ")", "{": "}"}
BEGINS, ENDS = {"if", "for", "while", "until", "case", "select"}, {"fi", "done", "esac"}
WITHIN = {"then", "else", "elif", "do", "!", "{", "}", "time", "exec"}
DECLARES = {"export", "declare", "readonly", "local", "typeset"}
PERHAPS = "&&"
"""Stands first in what is carried out, or not, by how the command before it ended."""
HEREDOC = re.compile(r"<<(-?)\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([\w.]+))(.*)\n")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True)
class Word:
    """One argument."""

    text: str
    unknown: tuple[str, ...] = ()

    def split(self) -> list[Word]:
        """Cut at blanks, as what stands for it outside of quotes would be."""
        return [self] if self.unknown else [Word(part) for part in self.text.split()]


@dataclass(slots=True)
class Script:
    """What is known while a script is read from its beginning."""

    values: dict[str, list[Word]] = field(default_factory=dict)
    depth: int = 0

    def commands(self, text: str) -> Iterator[list[Word]]:
        for raw in _split(text):
            if words := self._carried_out(raw):
                yield words

    def _carried_out(self, raw: list[str]) -> list[Word]:
        perhaps, raw = raw[0] == PERHAPS, raw[raw[0] == PERHAPS :]
        self.depth += sum(word in BEGINS for word in raw[:1]) - sum(word in ENDS for word in raw[:1])
        while raw and raw[0] in WITHIN | DECLARES:
            raw = raw[1:]
        while raw and (found := ASSIGNMENT.fullmatch(raw[0])):
            self._assign(found[1], bool(found[2]), found[3], perhaps or self.depth > 0)
            raw = raw[1:]
        return [word for each in raw for word in self.expanded(each)]

    def _assign(self, name: str, more: bool, raw: str, perhaps: bool) -> None:
        if raw.startswith("(") and raw.endswith(")"):
            words = [word for command in _split(raw[1:-1]) for part in command for word in self.expanded(part)]
        else:
            words = self.expanded(raw, splits=False)
        if perhaps:
            words = [_unknown(name)]
        self.values[name] = [*self.values.get(name, []), *words] if more else words

    def expanded(self, raw: str, splits: bool = True) -> list[Word]:
        """The words that one becomes: several from an array, or where blanks split one; none from an empty variable."""
        done: list[Word] = []
        text, unknown, quoted, at = "", [], False, 0

        def finish() -> None:
            nonlocal text, unknown, quoted
            if text or quoted:
                done.append(Word(text, tuple(dict.fromkeys(unknown))))
            text, unknown, quoted = "", [], False

        inside = False
        while at < len(raw):
            letter = raw[at]
            if letter == "'" and not inside:
                end = raw.find("'", at + 1) % (len(raw) + 1)
                text, quoted, at = text + raw[at + 1 : end], True, end + 1
            elif letter == '"':
                inside, quoted, at = not inside, quoted or not inside, at + 1
            elif letter == "\\" and at + 1 < len(raw) and (not inside or raw[at + 1] in '"\\$`\n'):
                text, at = text + raw[at + 1].strip("\n"), at + 2
            elif letter in "$`":
                found, at = self._substituted(raw, at)
                pieces = found if inside or not splits else [part for each in found for part in each.split()]
                for number, piece in enumerate(pieces):
                    if number:
                        finish()
                    text, unknown = text + piece.text, [*unknown, *piece.unknown]
                quoted = quoted and bool(found)
            else:
                text, at = text + letter, at + 1
        finish()
        return done

    def _substituted(self, raw: str, at: int) -> tuple[list[Word], int]:
        if raw[at] == "`":
            end = raw.find("`", at + 1) % (len(raw) + 1) + 1
            return [_unknown(raw[at:end])], end
        if raw.startswith("$((", at):
            end = _closed(raw, at + 1)
            return [self._number(raw[at + 3 : end - 2], raw[at:end])], end
        if raw.startswith("$(", at):
            end = _closed(raw, at + 1)
            return [_unknown(raw[at:end])], end
        if raw.startswith("${", at):
            end = _closed(raw, at + 1)
            return self._variable(raw[at + 2 : end - 1], raw[at:end]), end
        name = re.compile(r"\w+|[@*#?]").match(raw, at + 1)
        return (self._variable(name[0], name[0]), name.end()) if name else ([Word("$")], at + 1)

    def _variable(self, inside: str, shown: str) -> list[Word]:
        found = re.fullmatch(r"(\w+|[@*])(?:\[[@*]\])?(?::?([-=])(.*))?", inside, re.DOTALL)
        if found is None:
            return [_unknown(shown)]
        name, default = found[1], found[3]
        if name in self.values and not (default is not None and not self.values[name]):
            return self.values[name]
        if name in "@*":
            return []  # what the caller of the script adds
        if default is not None:
            return self.expanded(default, splits=False)
        return [Word("${oc.env:HOME}") if name == "HOME" else _unknown(name)]

    def _number(self, inside: str, shown: str) -> Word:
        def value(found: re.Match[str]) -> str:
            return "".join(word.text for word in self._variable(found[1], found[1]))

        known = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, inside)
        try:
            return Word(str(_calculated(ast.parse(known.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
            return _unknown(shown)


def _unknown(shown: str) -> Word:
    name = shown if shown.startswith(("$", "`")) else f"${shown}"
    return Word(name, (name,))


def _calculated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if abs(value) < 2**63:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _calculated(left), _calculated(right)
            if isinstance(op, ast.Pow) and not 0 <= second < 64:
                raise ValueError("too large")
            return OPERATORS[type(op)](first, second)
    raise ValueError("no arithmetic")


def _closed(text: str, at: int) -> int:
    depth, quote = 0, ""
    opening, closing = text[at], CLOSING[text[at]]
    comment = False
    for place in range(at, len(text)):
        letter = text[place]
        comment = letter != "\n" and (comment or (opening == "(" and letter == "#" and text[place - 1].isspace()))
        if comment and not quote:
            continue
        if quote:
            quote, comment = "" if letter == quote else quote, False
        elif letter in "\"'":
            quote = letter
        elif letter in (opening, closing):
            depth += 1 if letter == opening else -1
            if depth == 0:
                return place + 1
    return len(text)


def _split(text: str) -> Iterator[list[str]]:
    words: list[str] = []
    word, at, continued = "", 0, False
    text = _without_documents(text)
    while at <= len(text):
        letter = text[at : at + 1]
        if text.startswith("\\\n", at):
            continued, at = True, at + 2
            continue
        if letter == "#" and not word:
            at = text.find("\n", at) % (len(text) + 1) + continued
            continue
        if letter in ("'", '"', "`"):
            end = _quoted(text, at)
            word, at = word + text[at:end], end
        elif letter == "\\":
            word, at = word + text[at : at + 2], at + 2
        elif (letter == "$" and text[at + 1 : at + 2] in ("(", "{")) or (letter == "(" and word.endswith("=")):
            end = _closed(text, at + (letter == "$"))
            word, at = word + text[at:end], end
        elif letter and letter not in " \t\r\n;&|()":
            word, at = word + letter, at + 1
        else:
            words += [word] if word else []
            word = ""
            if letter not in (" ", "\t", "\r"):
                if words and words != [PERHAPS]:
                    yield words
                    words = []
                if text[at : at + 2] in ("&&", "||"):
                    words, at = [PERHAPS], at + 1
                elif letter != "\n":  # after which the command may stand
                    words = []
            at += 1
        continued = continued and letter in (" ", "\t")
    if word or words not in ([], [PERHAPS]):  # quotes that the text does not close
        yield [*words, *([word] if word else [])]


def _without_documents(text: str) -> str:
    """Remove here-documents: `<<EOF` up to EOF."""
    at = 0
    while found := HEREDOC.search(text, at):
        tabs, end = found[1] and "\t*", found[2] or found[3] or found[4]
        last = re.compile(rf"^{tabs}{re.escape(end)}$\n?", re.MULTILINE).search(text, found.end())
        at = found.start() + 1
        if last is not None:
            text = f"{text[: found.start()]} {found[5]}\n{text[last.end() :]}"
    return text


def _quoted(text: str, at: int) -> int:
    place = at + 1
    while place < len(text) and text[place] != text[at]:
        place += 2 if text[place] == "\\" and text[at] == '"' else 1
    return place + 1
