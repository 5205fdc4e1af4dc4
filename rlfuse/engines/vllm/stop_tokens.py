"""Find the tokens that can complete a stop text; all others of a response can wait in the engine core.

Only byte-level tokenizers have tokens whose text does not depend on their context; with others, each token is sent at
once. Invariant: outside incomplete characters, a token not in `ends` adds no last character of a stop text.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers.decoders import ByteLevel
from transformers import TokenizersBackend

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class EveryToken:
    """The set of all tokens."""

    def __contains__(self, token: object) -> bool:
        return True


EVERY_TOKEN = EveryToken()
NO_TOKEN: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StopTokens:
    """Tokens for some stop texts."""

    ends: frozenset[int]
    """Tokens with the last character of a stop text, or bytes of an incomplete character."""
    incomplete: frozenset[int]
    """Tokens with bytes of an incomplete character: text before it is decoded with the next token."""

    def after(self, token: int) -> Container[int]:
        """Return the tokens to send at once if they follow `token`."""
        return EVERY_TOKEN if token in self.incomplete else self.ends


class StopTokenTable:
    """Finds them for one tokenizer; None: the engine has none."""

    def __init__(self, tokenizer: Any):
        self._texts: dict[int, str] | None = None
        if isinstance(tokenizer, TokenizersBackend) and type(tokenizer.backend_tokenizer.decoder) is ByteLevel:
            decoder = tokenizer.backend_tokenizer.decoder
            self._texts = {number: decoder.decode([token]) for token, number in tokenizer.get_vocab().items()}
        self.find = cache(self._find)

    def _find(self, stop: tuple[str, ...]) -> StopTokens | None:
        """Return the tokens for these stop texts; None if a token's text depends on its context."""
        if self._texts is None or any(INCOMPLETE in text for text in stop):
            return None
        incomplete = _with_any(self._texts, INCOMPLETE)
        return StopTokens(incomplete | _with_any(self._texts, [text[-1] for text in stop]), incomplete)


def _with_any(texts: dict[int, str], characters: Sequence[str]) -> frozenset[int]:
    wanted = set(characters)
    return frozenset(number for number, text in texts.items() if not wanted.isdisjoint(text))
