"""A prompt with its clips' visual tokens in place: `<video>` markers and plans become token ids and positions.

Role: called wherever a row with clips becomes a prompt; engine and trainer take the same ids and put the same
embeddings at the same positions. Pure, for any tokenizer of transformers.
Invariants:
- visual positions are known because they were written here, never found by looking for an id;
- text, whoever wrote it, never becomes a visual token: a placeholder spelled out in a question or an answer is
  tokenised in two halves, which read the same;
- as many visual tokens as the plans say, all of them: a prompt that is too long is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.errors import VideoError
from rlfuse.video.plan import VideoPlan

MARKER = "<video>"
"""Stands in a row's text where a clip belongs."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """A model's tokens that stand for embeddings, as its vocabulary spells them."""

    placeholder: str
    """Repeated once for every visual token, for instance `<|video_pad|>`."""
    others: tuple[str, ...] = ()
    """More that no text may turn into, for instance `<|image_pad|>`."""

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Their ids, the placeholder's first; these are what an engine must never sample."""
        return [_id(tokenizer, text) for text in (self.placeholder, *self.others)]


@dataclass(frozen=True, slots=True)
class VideoPrompt:
    """Token ids and where among them each clip's embeddings go."""

    token_ids: np.ndarray
    """int32 [prompt tokens]."""
    positions: tuple[np.ndarray, ...]
    """int32 [visual tokens] for each clip, rising."""


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    plans: Sequence[VideoPlan],
    visual: VisualTokens,
    *,
    marker: str = MARKER,
    max_tokens: int | None = None,
) -> VideoPrompt:
    """The prompt `text`, chat template applied, with each marker replaced by its plan's pieces, in order.

    Raises VideoError where markers and plans don't match in number, or the prompt has more than `max_tokens` tokens.
    """
    texts = text.split(marker)
    if len(texts) - 1 != len(plans):
        raise VideoError(
            f"the prompt has {_counted(len(texts) - 1, f'{marker} marker')} and {_counted(len(plans), 'clip')}: "
            f"{_shortened(text)!r}",
            f"Give as many clips as markers; text that is no marker must not contain {marker}",
        )
    placeholder = visual.ids(tokenizer)[0]
    ids, positions, before = [], [], texts[0]
    for plan, following in zip(plans, texts[1:], strict=True):
        places: list[int] = []
        for piece in plan.pieces:
            ids += tokenise(tokenizer, before + piece.text, visual)
            places += range(len(ids), len(ids) + piece.tokens)
            ids += [placeholder] * piece.tokens
            before = ""
        positions.append(np.asarray(places, dtype=np.int32))
        before = following
    ids += tokenise(tokenizer, before, visual)
    if max_tokens is not None and len(ids) > max_tokens:
        seen = sum(plan.tokens for plan in plans)
        raise VideoError(
            f"the prompt has {len(ids)} tokens ({seen} visual, {len(ids) - seen} of text and timestamps), and at most "
            f"{max_tokens} are allowed",
            "Lower the video budget or raise the context length: visual tokens are never cut",
        )
    return VideoPrompt(np.asarray(ids, dtype=np.int32), tuple(positions))


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, visual: VisualTokens) -> list[int]:
    """Ids of a text, none of them visual; other special tokens, such as those of a chat template, are read as such."""
    parts = [text]
    for word in (visual.placeholder, *visual.others):
        half = len(word) // 2
        parts = [cut for part in parts for cut in _split(part, word, (word[:half], word[half:]))]
    ids = [token for part in parts if part for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    found = set(ids) & set(visual.ids(tokenizer))
    if found:
        raise VideoError(
            f"the text {_shortened(text)!r} is tokenised to {tokenizer.convert_ids_to_tokens(sorted(found))}, which "
            "stand for visual tokens",
            "Remove what this tokenizer's normalisation turns into them",
        )
    return ids


def _split(text: str, word: str, halves: tuple[str, str]) -> list[str]:
    """The text in parts of which none contains `word`."""
    first, *rest = text.split(word)
    return [first, *(part for following in rest for part in (*halves, following))]


def _id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    token = tokenizer.convert_tokens_to_ids(text)
    if token is None or tokenizer.convert_ids_to_tokens(token) != text:
        raise VideoError(
            f"the tokenizer has no token {text!r}", "Name a visual token of the model's own vocabulary, or add this one"
        )
    return token


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
