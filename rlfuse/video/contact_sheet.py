"""Draw a contact sheet: the model's input frames with their times, the question, and all answers. Pure.

Frames beyond `MOST_FRAMES`, long texts and answers beyond `MAX_ANSWERS` are omitted and counted.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlfuse.samples import Reward, RewardFailure
from rlfuse.video.plan import VideoPlan

MOST_FRAMES = 640
GRID = (1120, 760)
THUMB = range(60, 281)
PANEL = 420
MAX_ANSWERS = 32
GAP, MARGIN, LABEL = 6, 24, 15
PAPER, INK, PALE, LINE = "#ffffff", "#22262b", "#7d858e", "#e3e6ea"
GOOD, BAD, FAILED = "#1f8a4c", "#c2385a", "#b87503"
SIZE, STEP = 12, 17
Paragraph = tuple[str, str, int]
"""Text, colour, maximum number of lines."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer with its reward."""

    text: str
    reward: Reward | RewardFailure | None = None


@dataclass(frozen=True, slots=True)
class Caption:
    """Texts next to and below the frames."""

    title: str
    question: str
    answers: tuple[Answer, ...]
    truth: str = ""


def shown_frames(plans: Sequence[VideoPlan]) -> list[list[int]]:
    """Return the indices of the frames to show for each plan: about `MOST_FRAMES` in total, at least one per plan."""
    frames = [
        (place, index) for place, plan in enumerate(plans) for index in range(1 if plan.is_image else plan.frames)
    ]
    shown: list[list[int]] = [[] for _ in plans]
    for choice in np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().astype(int):
        place, index = frames[choice]
        shown[place].append(index)
    return [indices or [0] for indices in shown]


def contact_sheet(seen: Sequence[tuple[np.ndarray, VideoPlan]], caption: Caption) -> Image.Image:
    """Draw the sheet of clips and images, in order; each with its `shown_frames`, uint8 [shown, height, width, 3]."""
    places = shown_frames([plan for _, plan in seen])
    for (frames, plan), shown in zip(seen, places, strict=True):
        if frames.shape != (expected := (len(shown), plan.height, plan.width, 3)) or frames.dtype != np.uint8:
            raise ValueError(
                f"frames: got {frames.dtype} {frames.shape}; expected uint8 {expected}, the plan's shown_frames"
            )
    grid = _grid(seen, places)
    facts = "\n".join(_facts([plan for _, plan in seen], sum(map(len, places))))
    question = [(caption.title, PALE, 3), ("\nQuestion", PALE, 2), (caption.question or "(empty)", INK, 16)]
    truth = [("\nGround truth", PALE, 2), (caption.truth, INK, 6)] if caption.truth else []
    panel = _text([*question, *truth, (f"\n{facts}", PALE, 16)], PANEL)
    width, top = MARGIN + grid.width + panel.width, max(grid.height, panel.height)
    answers = _text(_answers(caption.answers), width)
    sheet = Image.new("RGB", (2 * MARGIN + width, 3 * MARGIN + top + answers.height), PAPER)
    sheet.paste(grid, (MARGIN, MARGIN))
    sheet.paste(panel, (2 * MARGIN + grid.width, MARGIN))
    sheet.paste(answers, (MARGIN, 2 * MARGIN + top))
    return sheet


def _grid(seen: Sequence[tuple[np.ndarray, VideoPlan]], places: Sequence[Sequence[int]]) -> Image.Image:
    pictures = [
        (pixels, "image" if plan.is_image else f"{plan.times[index]:.1f} s")
        for (frames, plan), shown in zip(seen, places, strict=True)
        for pixels, index in zip(frames, shown, strict=True)
    ]
    width, height = _thumbnail(len(pictures), max(plan.width / plan.height for _, plan in seen))
    columns = max(1, min(len(pictures), (GRID[0] + GAP) // (width + GAP)))
    rows = math.ceil(len(pictures) / columns)
    across, down = width + GAP, height + LABEL + GAP
    grid = Image.new("RGB", (columns * across - GAP, rows * down - GAP), PAPER)
    draw = ImageDraw.Draw(grid)
    for place, (pixels, label) in enumerate(pictures):
        left, top = place % columns * across, place // columns * down
        tall, wide = pixels.shape[:2]
        size = min(width, max(1, round(height * wide / tall))), height
        # Pixels of small frames stay visible; large frames are smoothed.
        method = Image.Resampling.NEAREST if width >= 2 * wide else Image.Resampling.LANCZOS
        grid.paste(Image.fromarray(pixels).resize(size, method), (left, top))
        draw.rectangle((left, top, left + size[0] - 1, top + height - 1), outline=LINE)
        middle = (left + width / 2, top + height + LABEL / 2 + 1)
        draw.text(middle, label, PALE, anchor="mm")
    return grid


def _thumbnail(count: int, shape: float) -> tuple[int, int]:
    for width in reversed(THUMB):
        height = max(1, round(width / shape))
        columns, rows = (GRID[0] + GAP) // (width + GAP), (GRID[1] + GAP) // (height + LABEL + GAP)
        if columns * rows >= count:
            return width, height
    return THUMB[0], max(1, round(THUMB[0] / shape))


def _facts(plans: Sequence[VideoPlan], shown: int) -> Iterator[str]:
    for plan in plans:
        size, count = f"{plan.width} x {plan.height}", f"{plan.tokens:,} visual tokens"
        if plan.is_image:
            yield f"an image of {size}, {count}"
            continue
        patch = "a frame" if plan.temporal_patch == 1 else f"for {plan.temporal_patch} frames"
        left_out = f", {shown} of them shown" if shown < plan.frames else ""
        yield f"{plan.frames} frames of {size}, {plan.fps:.3g} a second{left_out}"
        yield f"{count}, {'' if plan.kept is None else 'at most '}{plan.tokens_per_frame} {patch}"


def _answers(answers: Sequence[Answer]) -> Iterator[Paragraph]:
    for number, answer in enumerate(answers[:MAX_ANSWERS]):
        reward = answer.reward
        if isinstance(reward, Reward):
            parts = ", ".join(f"{name} {part:.3g}" for name, part in reward.parts.items())
            colour, text = (
                GOOD if reward.value > 0 else BAD,
                f"reward {reward.value:.4g}" + (f" ({parts})" * bool(parts)),
            )
        else:
            colour, text = FAILED, f"failed: {reward.function}: {reward.message}" if reward else "not scored"
        yield f"\nAnswer {number}: {text}", colour, 4
        yield answer.text or "(empty)", INK, 8
    if len(answers) > MAX_ANSWERS:
        yield f"\nand {len(answers) - MAX_ANSWERS} more answers", PALE, 2


def _text(paragraphs: Iterable[Paragraph], width: int) -> Image.Image:
    """Draw paragraphs from top to bottom; the middle of paragraphs that are too long is omitted, with a line count."""
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")), SIZE)
    lines: list[tuple[str, str]] = []
    for text, colour, most in paragraphs:
        wrapped = [
            line for part in text.splitlines() for line in textwrap.wrap(part, int(width / font.getlength("x"))) or [""]
        ]
        if len(wrapped) > most:
            head, tail = wrapped[: most // 2], wrapped[len(wrapped) - (most - 1) // 2 :]
            wrapped = [*head, f"… {len(wrapped) - len(head) - len(tail)} lines …", *tail]
        lines += [(line, colour) for line in wrapped]
    image = Image.new("RGB", (width, STEP * len(lines)), PAPER)
    draw = ImageDraw.Draw(image)
    for row, (line, colour) in enumerate(lines):
        draw.text((0, row * STEP), line, colour, font)
    return image
