"""Find the tokens that can complete a stop text; all other response tokens can be held in the engine core.

Only in byte-level tokenizers the text of a token does not depend on its context; with other tokenizers, each token is
sent immediately. Invariant: except in incomplete characters, a token not in `ends` never adds the last character of a
stop text.
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
    """Tokens that can complete given stop texts."""

    ends: frozenset[int]
    """Tokens that contain the last character of a stop text, or bytes of an incomplete character."""
    incomplete: frozenset[int]
    """Tokens with bytes of an incomplete character, which is decoded together with the next token."""

    def after(self, token: int) -> Container[int]:
        """Return the tokens that must be sent immediately if they follow `token`."""
        return EVERY_TOKEN if token in self.incomplete else self.ends


class StopTokenTable:
    """Lookup of `StopTokens` for one tokenizer; None: the engine has no tokenizer."""

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
    character_set = set(characters)
    return frozenset(number for number, text in texts.items() if not character_set.isdisjoint(text))
