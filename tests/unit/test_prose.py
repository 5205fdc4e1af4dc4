"""Prose of pages, docstrings, comments and messages: words to replace, length of sentences, purpose of a page.

Code, quoted text and link targets are skipped. No prose linter on PyPI checks phrases in docstrings and messages.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from texts import ROOT, comments, docstrings, function_docstrings, message_list, messages, modules, names

GENERATED = {"conf/KEYS.md", "jobs/messages.md", "rlfuse/engines/FAMILIES.md"}
"""Pages whose texts are checked in the package."""
FOLDERS = (".", "jobs", "rlfuse", "tests")


def pages() -> list[str]:
    found = {path for folder in FOLDERS for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")}
    return sorted({path.resolve().relative_to(ROOT).as_posix() for path in found} - GENERATED)


PAGES = pages()
INSTEAD = {
    r"told|tells?|said|says|heard|asked": "logged, reported, received, requested",
    r"beside": "alongside, next to",
    r"(?:goes|go|going|went|gone) (?:on|over)": "continues, is transferred",
    r"(?:is|are) there|(?:it|they) comes?": "is resident, arrives",
    r"stands?(?!-in| for)|stood": "is",
    r"apart": "differ by, except",
    r"nobody|whoever|somebody": "none, the caller, another process",
    r"anew|once more": "again, from scratch",
    r"in turns?|by turns|takes? turns|turn by turn": "alternate",
    r"(?:before|after) anything (?:runs|starts|is)": "at startup, before the run starts",
    r"in the mean|at worst|at the (?:most|least)": "on average, at most, in the worst case",
    r"times as (?:fast|long|slow|many|much)": "1.5x faster",
    r"figures?": "number, measurement",
    r"by hand|in earnest": "manually, real",
    r"(?:it|that|this|which|they|fusion) pays?": "is worth it",
    r"(?:reward|polic(?:y|ies)|metric|function|loss|class|code|file)s? of (?:your|my) own": "custom, user-defined",
    r"foreign": "third-party",
    r"(?<!model )cards?": "GPU",
    r"mend(?:s|ed|ing)?": "fix",
    r"by (?:itself|themselves)": "automatically, alone",
    r"puts? up with|sooner|to blame|for good|held against": "tolerates, earlier, cause, permanently, compared with",
}
"""Patterns of words, and what to write instead."""
TRANSLATED = re.compile(r"\b(?:told|tells?|said|says|heard|asked|beside|stands|stood|nobody|whoever|anew|apart)\b")
"""Words to replace in names of tests, arguments and variables."""
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(name, words) that are right where they are: the reason."""
NO_VERB = re.compile(
    r"(?:[`\[(\d]|(?:A|All|An|As|At|By|Each|Every|For|From|How|If|In|Into|It|Its|No|None|Nothing|Of|On|One|Since|That|The"
    r"|Their|Those|To|Under|What|When|Where|Whether|Who|Whoever|Whose|Why|With|Without)\b)"
)
"""First words of a docstring that are no verb; ruff's D401 finds others."""
MAX_WORDS = 20


def notebook_text(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def module_text(path: Path) -> str:
    source = path.read_text()
    return "\n\n".join([*docstrings(source), *comments(source), *messages(source)])


def by_folder(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return folder -> modules in it."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return found


PACKAGES = by_folder(modules())
TESTS = by_folder(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
NAMES = [*PAGES, *PACKAGES, "notebooks"]


def texts(name: str) -> dict[str, str]:
    """Return file -> text for a page, for a package, or for the notebooks."""
    if name == "notebooks":
        return {path.name: notebook_text(path) for path in (ROOT / name).glob("*.ipynb")}
    if name in PACKAGES:
        return {path.relative_to(ROOT).as_posix(): module_text(path) for path in PACKAGES[name]}
    return {name: (ROOT / name).read_text()}


def prose(text: str) -> str:
    """Return Markdown without code, quotes, images and link targets; a code span becomes the word CODE."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"``[^`]+``|`[^`]*`", "CODE", text)
    text = re.sub(r'"[^"\n]*"', "QUOTE", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and list items; headings and tables have none."""
    lines = [line for line in prose(text).splitlines() if not line.startswith(("|", "#"))]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    return [part.strip() for block in blocks for part in re.split(r"(?<=[.!?])\s+", block) if part.strip()]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'-]*[A-Za-z0-9][\w'.,-]*", sentence))


def wrong_words(name: str, text: str) -> list[str]:
    """Return `words: replacement` for each pattern that occurs and is no exception."""
    found = []
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", " ".join(prose(text).split()), re.IGNORECASE):
            if (name, match[0].lower()) not in EXCEPTIONS:
                around = match.string[max(0, match.start() - 40) : match.end() + 40]
                found.append(f"{match[0]}: write {instead} ({around})")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_no_word_of_the_list(name):
    found = {file: wrong for file, text in texts(name).items() if (wrong := wrong_words(file, text))}
    assert not found, "\n".join(f"{file}: {each}" for file, wrong in found.items() for each in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("folder", TESTS)
def test_tests_have_no_word_of_the_list(folder):
    found = []
    for path in TESTS[folder]:
        source = path.read_text()
        wrong = wrong_words(path.name, "\n\n".join([*docstrings(source), *comments(source)]))
        wrong += [name for name in dict.fromkeys(names(source)) if TRANSLATED.search(name)]
        found += [f"{path.name}: {each}" for each in wrong]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_functions_start_with_a_verb(package):
    texts = [(path.name, text) for path in PACKAGES[package] for text in function_docstrings(path.read_text())]
    found = [f"{name}: {text.splitlines()[0]}" for name, text in texts if NO_VERB.match(text)]
    assert not found, f"{package}: write what the function does, as in `Return the ...`:\n" + "\n".join(found)


@pytest.mark.slow
def test_the_list_of_messages_is_current():
    renew = "python tests/texts.py > jobs/messages.md"
    assert (ROOT / "jobs/messages.md").read_text() == message_list(), f"run {renew}, and read what changed"


@pytest.mark.parametrize("page", PAGES)
def test_sentences_of_a_page_are_short(page):
    found = sentences((ROOT / page).read_text())
    lengths, longest = [words(sentence) for sentence in found], max(found, key=words)
    assert sum(lengths) <= MAX_WORDS * len(lengths), f"{page}: {sum(lengths) / len(lengths):.1f}; longest: {longest}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_starts_with_a_title_and_a_sentence_on_what_it_is_for(page):
    title, empty, first = (ROOT / page).read_text().split("\n", 2)
    assert re.match(r"# \w", title) and not empty
    assert re.match(r"[A-Z]", first), f"{page}: prose has to follow the title, not {first[:40]!r}"
    assert 5 <= words(sentences(first)[0]) <= 40


def test_exceptions_are_few_needed_and_explained():
    assert len(EXCEPTIONS) <= 30 and all(EXCEPTIONS.values())
    names = NAMES if EXCEPTIONS else []
    files = {file: text for name in names for file, text in texts(name).items()}
    for name, phrase in EXCEPTIONS:
        assert phrase in " ".join(prose(files[name]).split()).lower(), f"{name}: {phrase} is not in the text"


def test_texts_of_a_module_are_found():
    source = (
        '"""Doc."""\nx = 1  # one\n# two\n# three\n"""Field."""\ndef f():\n    """Do."""\n'
        'raise E(f"{x} is not the valid value, " + "give 1")  # noqa\n'
    )
    assert list(function_docstrings(source)) == ["Do."]
    assert (list(docstrings(source)), list(comments(source))) == (["Doc.", "Field.", "Do."], ["one", "two three"])
    assert list(messages(source)) == ["… is not the valid value, give 1"]


def test_words_and_sentences_are_found():
    text = '# T\n\nIt `told` "a card". One goes on.\n\n| told |\n\n- [stands](told.md)\n- e\n```\ncard\n```\n'
    assert [each.split(":")[0] for each in wrong_words("x", text)] == ["told", "goes on", "stands"]
    assert sentences(text) == ["It CODE QUOTE.", "One goes on.", "- stands", "- e"]
    assert words("- It takes 1.5x at `a`, so 3 %.") == 7
