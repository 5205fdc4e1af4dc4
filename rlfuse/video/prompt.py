"""Assemble a prompt with visual tokens in place of `<video>` and `<image>` markers. Pure.

Visual positions are recorded here, never searched for. Placeholder tokens spelled in text stay text.
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
"""Modality -> marker of a clip or image in a row's text."""
_QUOTED = {marker: f"<\ufdd0{marker[1:]}" for marker in MARKERS.values()}
"""Marker -> escaped spelling of literal text, with a Unicode noncharacter; removed when the prompt is assembled."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """Placeholder tokens of a model, as spelled in its vocabulary."""

    video: str
    image: str

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Return the placeholder ids by modality, which engines must never sample."""
        return {"video": _id(tokenizer, self.video), "image": _id(tokenizer, self.image)}


@dataclass(frozen=True, slots=True)
class VideoPrompt:
    """Token ids of a prompt, and the positions of each plan's embeddings."""

    token_ids: np.ndarray
    positions: tuple[np.ndarray, ...]
    spans: tuple[tuple[int, int], ...] = ()
    """First and last (exclusive) token of each plan, including timestamps and start and end tokens."""


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    plans: Sequence[VideoPlan],
    visual: VisualTokens,
    frame: tuple[str, str] = ("", ""),
) -> VideoPrompt:
    """Tokenise `text` (chat template applied), with each `<video>` and `<image>` marker replaced by its plan's pieces.

    Plans of each modality are used in order. `frame`: special tokens before and after each clip or image. Raises
    VideoError if the number of markers and plans differs.
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
    """Return `text` with markers escaped, so that `assemble` treats them as text."""
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
        f"Use one marker per {noun}, and remove {marker} from other text",
    )


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, visual: VisualTokens) -> list[int]:
    """Return the token ids of a text without visual tokens; other special tokens are parsed (chat template)."""
    parts = [unescape_markers(text)]
    for word in (visual.video, visual.image):
        half = len(word) // 2
        parts = [cut for part in parts for cut in _split(part, word, (word[:half], word[half:]))]
    ids = [token for part in parts if part for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    found = set(ids) & set(visual.ids(tokenizer).values())
    if found:
        raise VideoError(
            f"the text {_shortened(text)!r} is tokenised to {tokenizer.convert_ids_to_tokens(sorted(found))}, which "
            "are visual placeholders",
            "Remove the characters that this tokenizer normalises to them",
        )
    return ids


def _split(text: str, word: str, halves: tuple[str, str]) -> list[str]:
    first, *rest = text.split(word)
    return [first, *(part for following in rest for part in (*halves, following))]


def _id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    token = tokenizer.convert_tokens_to_ids(text)
    if token is None or tokenizer.convert_ids_to_tokens(token) != text:
        raise VideoError(
            f"the tokenizer has no token {text!r}", "Use a visual token of the model's vocabulary, or add this one"
        )
    return token


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
