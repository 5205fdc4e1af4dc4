"""Assemble a prompt with visual tokens in place of `<video>` and `<image>` markers. Pure.

Visual positions are recorded here, never searched for. A placeholder spelled out in text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.errors import VideoError
from rlfuse.video.plan import VideoPlan

MARKERS = {"video": "<video>", "image": "<image>"}
"""By modality, what stands in a row's text where a clip or an image belongs."""
_QUOTED = {marker: f"<\ufdd0{marker[1:]}" for marker in MARKERS.values()}
"""Spelling of a marker that is text, with a noncharacter; only the assembly of prompts sees it."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """A model's tokens that stand for embeddings, as its vocabulary spells them."""

    video: str
    image: str

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Their ids by modality; these are what an engine must never sample."""
        return {"video": _id(tokenizer, self.video), "image": _id(tokenizer, self.image)}


@dataclass(frozen=True, slots=True)
class VideoPrompt:
    """Token ids and where among them each plan's embeddings go."""

    token_ids: np.ndarray
    positions: tuple[np.ndarray, ...]
    spans: tuple[tuple[int, int], ...] = ()
    """For each plan the first and last (exclusive) token that belongs to it: visual tokens, timestamps, frame."""


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    plans: Sequence[VideoPlan],
    visual: VisualTokens,
    frame: tuple[str, str] = ("", ""),
) -> VideoPrompt:
    """The prompt `text`, chat template applied, with each marker replaced by its plan's pieces: `<video>` by those of
    clips and `<image>` by those of images, each in order. `frame`: special tokens before and after each of them.

    Raises VideoError where markers and plans don't match in number.
    """
    before, *rest = re.split(f"({'|'.join(MARKERS.values())})", text)
    markers, texts = rest[::2], rest[1::2]
    for modality, marker in MARKERS.items():
        _check_count(text, modality, markers.count(marker), sum(plan.modality == modality for plan in plans))
    left = {marker: [i for i, plan in enumerate(plans) if plan.modality == kind] for kind, marker in MARKERS.items()}
    placeholders, ids, positions, spans = visual.ids(tokenizer), [], {}, {}
    for marker, following in zip(markers, texts, strict=True):
        places: list[int] = []
        plan = plans[index := left[marker].pop(0)]
        alone, first = tokenise(tokenizer, before, visual), None
        before += frame[0]
        for piece in plan.pieces:
            found = tokenise(tokenizer, before + piece.text, visual)
            if first is None:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, found, strict=False))
                first = len(ids) + len([*same])
            ids += found
            places += range(len(ids), len(ids) + piece.tokens)
            ids += [placeholders[plan.modality]] * piece.tokens
            before = ""
        positions[index] = np.asarray(places, dtype=np.int32)
        before = plan.behind + frame[1]
        spans[index] = first, len(ids) + len(tokenise(tokenizer, before, visual))
        before += following
    ids += tokenise(tokenizer, before, visual)
    in_order = (tuple(each[index] for index in range(len(plans))) for each in (positions, spans))
    return VideoPrompt(np.asarray(ids, dtype=np.int32), *in_order)


def escape_markers(text: str) -> str:
    """Return `text` with its markers spelled so that `assemble` reads them as text."""
    for marker, spelled in _QUOTED.items():
        text = text.replace(marker, spelled)
    return text


def unescape_markers(text: str) -> str:
    """Undo `escape_markers`."""
    for marker, spelled in _QUOTED.items():
        text = text.replace(spelled, marker)
    return text


def _check_count(text: str, modality: str, markers: int, plans: int) -> None:
    if markers == plans:
        return
    marker, noun = MARKERS[modality], {"video": "clip", "image": "image"}[modality]
    raise VideoError(
        f"the prompt has {_counted(markers, f'{marker} marker')} and {_counted(plans, noun)}: {_shortened(text)!r}",
        f"Give as many {noun}s as markers; text that is no marker must not contain {marker}",
    )


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, visual: VisualTokens) -> list[int]:
    """Ids of a text, none of them visual; other special tokens, such as those of a chat template, are read as such."""
    parts = [unescape_markers(text)]
    for word in (visual.video, visual.image):
        half = len(word) // 2
        parts = [cut for part in parts for cut in _split(part, word, (word[:half], word[half:]))]
    ids = [token for part in parts if part for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    found = set(ids) & set(visual.ids(tokenizer).values())
    if found:
        raise VideoError(
            f"the text {_shortened(text)!r} is tokenised to {tokenizer.convert_ids_to_tokens(sorted(found))}, which "
            "stand for visual tokens",
            "Remove what this tokenizer's normalisation turns into them",
        )
    return ids


def _split(text: str, word: str, halves: tuple[str, str]) -> list[str]:
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
