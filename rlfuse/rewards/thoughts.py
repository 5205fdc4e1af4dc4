"""A response's thought, and the answer that follows it."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def answer_of(text: str) -> str:
    """What follows the last thought, stripped; the whole text where there is none, "" where a thought has no end."""
    return text.rpartition(CLOSE)[2].partition(OPEN)[0].strip()
