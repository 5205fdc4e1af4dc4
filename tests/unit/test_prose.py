"""Prose of the pages: no word of the list below, short sentences, and a first sentence that says what a page is for.

Code, quoted text and link targets are skipped. A kind of text is checked once its (name, text) pairs are in `TEXTS`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    "jobs/README.md",
    "jobs/clusters.md",
    "jobs/coming_from.md",
    "jobs/first_day.md",
    "jobs/long_video.md",
    "jobs/papers.md",
    "jobs/platforms.md",
    "jobs/rewards.md",
    "jobs/runs.md",
    "jobs/security.md",
    "jobs/troubleshooting.md",
    "jobs/trusting_a_run.md",
    "jobs/when_fusion_pays.md",
    "tests/README.md",
    "tests/benchmarks/README.md",
    "tests/benchmarks/gpu.md",
    "tests/benchmarks/planning.md",
    "tests/gpu/README.md",
)
INSTEAD = {
    r"told|tells?|said|says|heard|asked": "logged, reported, received, requested",
    r"beside": "alongside, next to",
    r"(?:goes|go|going|went|gone) (?:on|over)": "continues, is transferred",
    r"(?:is|are) there|(?:it|they) comes?": "is resident, arrives",
    r"stands?|stood": "is",
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
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(name, words) that are right where they are: the reason."""
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
MAX_WORDS = 20


def prose(text: str) -> str:
    """Return Markdown without code, quotes, images and link targets; a code span becomes the word CODE."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
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


@pytest.mark.parametrize("name", TEXTS)
def test_text_has_no_word_of_the_list(name):
    found = wrong_words(name, TEXTS[name])
    assert not found, f"{name}:\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_sentences_of_a_page_are_short(page):
    lengths = [words(sentence) for sentence in sentences(TEXTS[page])]
    longest = max(sentences(TEXTS[page]), key=words)
    assert sum(lengths) <= MAX_WORDS * len(lengths), f"{page}: {sum(lengths) / len(lengths):.1f}; longest: {longest}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_starts_with_a_title_and_a_sentence_on_what_it_is_for(page):
    title, empty, first = TEXTS[page].split("\n", 2)
    assert re.match(r"# \w", title) and not empty
    assert re.match(r"[A-Z]", first), f"{page}: prose has to follow the title, not {first[:40]!r}"
    assert 5 <= words(sentences(first)[0]) <= 40


def test_exceptions_are_few_needed_and_explained():
    assert len(EXCEPTIONS) <= 30 and all(EXCEPTIONS.values())
    for name, phrase in EXCEPTIONS:
        assert phrase in " ".join(prose(TEXTS[name]).split()).lower(), f"{name}: {phrase} is not in the text"


def test_words_and_sentences_are_found():
    text = '# T\n\nIt `told` "a card". One goes on.\n\n| told |\n\n- [stands](told.md)\n- e\n```\ncard\n```\n'
    assert [each.split(":")[0] for each in wrong_words("x", text)] == ["told", "goes on", "stands"]
    assert sentences(text) == ["It CODE QUOTE.", "One goes on.", "- stands", "- e"]
    assert words("- It takes 1.5x at `a`, so 3 %.") == 7
