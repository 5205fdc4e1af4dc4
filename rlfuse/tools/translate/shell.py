"""Find the words that a shell script passes to its commands, without running it.

Resolves assignments, arrays, defaults (`${A:-b}`), integer arithmetic and quotes; anything else remains as `$NAME`.
Comments between continued lines are supported. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

CLOSING = {"(": ")", "{": "}"}
BLOCK_START, BLOCK_END = {"if", "for", "while", "until", "case", "select"}, {"fi", "done", "esac"}
SKIPPED = {"then", "else", "elif", "do", "!", "{", "}", "time", "exec"}
CONDITIONS = {"if", "while", "until"}
DECLARATIONS = {"export", "declare", "readonly", "local", "typeset"}
HERE = "\0"
"""The working folder ($PWD, `pwd`) within a word, which makes paths relative."""
CONDITIONAL = "&&"
"""First word of a command that runs depending on the exit status of the previous one."""
HEREDOC = re.compile(r"<<(-?)\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([\w.]+))(.*)\n")
ARITHMETIC = "let"
"""First word of `((...))` as it is read."""
CHANGE = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
"""A variable that arithmetic changes."""
READERS = {"read", "unset", "mapfile", "readarray", "printf", "getopts"}
"""Commands that set variables without an assignment, which are among their words."""
FILES, SETUP = {"source", ".", "eval"}, re.compile(r"conda|activate|bashrc|set_env")
"""Commands that run other text, which may set any variable, and what is known not to."""
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
    """One argument. `unknown`: variables without a known value."""

    text: str
    unknown: tuple[str, ...] = ()

    def split(self) -> list[Word]:
        """Split at spaces, like an unquoted variable."""
        if any(" " in name for name in self.unknown):
            return [self]
        return [Word(part, tuple(name for name in self.unknown if name in part)) for part in self.text.split()]


@dataclass(slots=True)
class Script:
    """State of the variables while a script is read."""

    values: dict[str, list[Word]] = field(default_factory=dict)
    depth: int = 0
    braces: int = 0
    """Depth of `{ }`: within a function, $@ are its arguments."""

    def commands(self, text: str) -> Iterator[list[Word]]:
        """Yield the words of each command; `values` then has the variables that it sees."""
        for raw in _split(text):
            before = dict(self.values)
            if words := self._evaluate(raw):
                yield words
            if words and ASSIGNMENT.fullmatch(raw[0]):  # NAME=value command: for this command only
                self.values = before

    def _evaluate(self, raw: list[str]) -> list[Word]:
        is_conditional, raw = raw[0] == CONDITIONAL, raw[raw[0] == CONDITIONAL :]
        self.braces += ("{" in raw[:1] + raw[-1:]) - ("}" in raw[:1])
        while raw and raw[0] in SKIPPED:
            raw = raw[1:]
        self.depth += sum(word in BLOCK_START for word in raw[:1]) - sum(word in BLOCK_END for word in raw[:1])
        others = self._set_otherwise(raw)
        while raw and raw[0] in DECLARATIONS:
            raw = raw[1:]
        count = next((at for at, each in enumerate(raw) if not ASSIGNMENT.fullmatch(each)), len(raw))
        words = [_relative(word) for each in raw[count:] for word in self.expand(each)]
        for found in map(ASSIGNMENT.fullmatch, raw[:count]):
            self._assign(found[1], bool(found[2]), found[3], is_conditional or self.depth > 0)
        self.values |= {name: [_unknown(name)] for name in others}
        return words

    def _set_otherwise(self, raw: list[str]) -> list[str]:
        """Return the variables that a command sets or unsets without an assignment."""
        while raw and (raw[0] in CONDITIONS or ASSIGNMENT.fullmatch(raw[0])):
            raw = raw[1:]
        match raw:
            case [*_, first, inside] if first == ARITHMETIC:
                return [before or after for before, after in CHANGE.findall(inside)]
            case ["for" | "select", name, *_]:
                return [name]
            case [command, *names] if command in READERS:
                return [name for name in names if name.isidentifier()]
            case [command, *words] if command in FILES and not SETUP.search(" ".join(words)):
                return [*self.values]
        return []

    def _assign(self, name: str, more: bool, raw: str, is_conditional: bool) -> None:
        is_array = raw.startswith("(") and raw.endswith(")")
        if is_array:
            words = [word for command in _split(raw[1:-1]) for part in command for word in self.expand(part)]
        else:
            words = self.expand(raw, splits=False)
        before = self.values.get(name, [])
        if is_conditional or (self.braces and before and before != words):  # a function that may be called or not
            words = [_unknown(name)]
        elif more and not is_array and before and words:
            first, added = before[0], words[0]
            words = [Word(first.text + added.text, (*first.unknown, *added.unknown)), *before[1:]]
        elif more:
            words = [*before, *words]
        self.values[name] = words

    def expand(self, raw: str, splits: bool = True) -> list[Word]:
        """Return the words to which a word expands: several for arrays and spaces, none for an empty variable."""
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
                found, at = self._substitute(raw, at)
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

    def _substitute(self, raw: str, at: int) -> tuple[list[Word], int]:
        if raw[at] == "`":
            end = raw.find("`", at + 1) % (len(raw) + 1) + 1
            return [_output(raw[at + 1 : end - 1], raw[at:end])], end
        if raw.startswith("$((", at):
            end = _closing(raw, at + 1)
            return [self._number(raw[at + 3 : end - 2], raw[at:end])], end
        if raw.startswith("$(", at):
            end = _closing(raw, at + 1)
            return [_output(raw[at + 2 : end - 1], raw[at:end])], end
        if raw.startswith("$'", at):
            end = raw.find("'", at + 2) % (len(raw) + 1) + 1
            return [_unknown(raw[at:end])], end
        if raw.startswith("${", at):
            end = _closing(raw, at + 1)
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
            return [_unknown(name)] if self.braces else []  # arguments of the script
        if default is not None:
            return self.expand(default, splits=False)
        return [Word({"HOME": "${oc.env:HOME}", "PWD": HERE}[name]) if name in ("HOME", "PWD") else _unknown(name)]

    def _number(self, inside: str, shown: str) -> Word:
        def value(found: re.Match[str]) -> str:
            return "".join(word.text for word in self._variable(found[1], found[1]))

        known = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, inside)
        try:
            return Word(str(_calculate(ast.parse(known.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
            return _unknown(shown)


def _output(command: str, shown: str) -> Word:
    return Word(HERE) if command.strip() == "pwd" else _unknown(shown)


def _relative(word: Word) -> Word:
    return Word(word.text.replace(f"{HERE}/", "").replace(HERE, "."), word.unknown) if HERE in word.text else word


def _unknown(shown: str) -> Word:
    name = shown if shown.startswith(("$", "`")) else f"${shown}"
    return Word(name, (name,))


def _calculate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if abs(value) < 2**63:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculate(operand)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _calculate(left), _calculate(right)
            if isinstance(op, ast.Pow) and not 0 <= second < 64:
                raise ValueError("too large")
            return OPERATORS[type(op)](first, second)
    raise ValueError("not integer arithmetic")


def _closing(text: str, at: int) -> int:
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
    text = _remove_heredocs(text)
    while at <= len(text):
        letter = text[at : at + 1]
        if text.startswith("\\\n", at):
            continued, at = True, at + 2
            continue
        if letter == "#" and not word:
            at = text.find("\n", at) % (len(text) + 1) + continued
            continue
        if text.startswith("((", at) and not word:
            end = _closing(text, at)
            words, at = [*words, ARITHMETIC, text[at + 2 : end - 2]], end
            continue
        if letter in ("'", '"', "`"):
            end = _end_of_quote(text, at)
            word, at = word + text[at:end], end
        elif letter == "\\":
            word, at = word + text[at : at + 2], at + 2
        elif (letter == "$" and text[at + 1 : at + 2] in ("(", "{")) or (letter == "(" and word.endswith("=")):
            end = _closing(text, at + (letter == "$"))
            word, at = word + text[at:end], end
        elif letter and letter not in " \t\r\n;&|()":
            word, at = word + letter, at + 1
        else:
            words += [word] if word else []
            word = ""
            if letter not in (" ", "\t", "\r"):
                if words and words != [CONDITIONAL]:
                    yield words
                    words = []
                if text[at : at + 2] in ("&&", "||"):
                    words, at = [CONDITIONAL], at + 1
                elif letter != "\n":  # after && or || the command may follow on the next line
                    words = []
            at += 1
        continued = continued and letter in (" ", "\t")
    if word or words not in ([], [CONDITIONAL]):  # unclosed quotes
        yield [*words, *([word] if word else [])]


def _remove_heredocs(text: str) -> str:
    """Remove here-documents (`<<EOF` to EOF)."""
    at = 0
    while found := HEREDOC.search(text, at):
        tabs, end = found[1] and "\t*", found[2] or found[3] or found[4]
        last = re.compile(rf"^{tabs}{re.escape(end)}$\n?", re.MULTILINE).search(text, found.end())
        at = found.start() + 1
        if last is not None:
            text = f"{text[: found.start()]} {found[5]}\n{text[last.end() :]}"
    return text


def _end_of_quote(text: str, at: int) -> int:
    place = at + 1
    while place < len(text) and text[place] != text[at]:
        place += 2 if text[place] == "\\" and text[at] == '"' else 1
    return place + 1
