"""Draw a contact sheet: the frames that the model saw with their times, the question, and all answers. Pure.

What does not fit (frames beyond `MOST_FRAMES`, long texts, answers beyond `MOST_ANSWERS`) is left out and counted.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlfuse.samples import Reward, RewardFailure
from rlfuse.video.plan import VideoPlan

MOST_FRAMES = 640
GRID = (1120, 760)
THUMB = range(60, 281)
PANEL, ANSWER = 420, 250
MOST_ANSWERS = 32
TALLEST = 1200
GAP, MARGIN, LABEL = 6, 24, 15
PAPER, INK, PALE, LINE = "#ffffff", "#22262b", "#7d858e", "#e3e6ea"
GOOD, BAD, FAILED = "#1f8a4c", "#c2385a", "#b87503"
SMALL, NORMAL, LARGE = 11, 14, 30


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers to the question."""

    text: str
    reward: Reward | RewardFailure | None = None


@dataclass(frozen=True, slots=True)
class Caption:
    """What stands beside and below the frames."""

    title: str
    question: str
    answers: tuple[Answer, ...]
    truth: str = ""


def shown_frames(plans: Sequence[VideoPlan]) -> list[list[int]]:
    """Return per plan the indices of shown frames: `MOST_FRAMES` in all, at least one of each."""
    frames = [(place, index) for place, plan in enumerate(plans) for index in range(1 if plan.still else plan.frames)]
    shown: list[list[int]] = [[] for _ in plans]
    for choice in np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().astype(int):
        place, index = frames[choice]
        shown[place].append(index)
    return [indices or [0] for indices in shown]


def contact_sheet(seen: Sequence[tuple[np.ndarray, VideoPlan]], caption: Caption) -> Image.Image:
    """Draw the sheet of clips and images, in order; of each the `shown_frames` as uint8 [shown, height, width, 3]."""
    places = shown_frames([plan for _, plan in seen])
    for (frames, plan), shown in zip(seen, places, strict=True):
        if frames.shape != (expected := (len(shown), plan.height, plan.width, 3)) or frames.dtype != np.uint8:
            raise ValueError(
                f"frames: got {frames.dtype} {frames.shape}; valid is uint8 {expected}, the plan's shown_frames"
            )
    grid = _grid(seen, places)
    panel = _panel([plan for _, plan in seen], caption, sum(map(len, places)))
    width, top = MARGIN + grid.width + panel.width, max(grid.height, panel.height)
    answers = _answers(caption.answers, width)
    sheet = Image.new("RGB", (2 * MARGIN + width, 3 * MARGIN + top + answers.height), PAPER)
    sheet.paste(grid, (MARGIN, MARGIN))
    sheet.paste(panel, (2 * MARGIN + grid.width, MARGIN))
    sheet.paste(answers, (MARGIN, 2 * MARGIN + top))
    return sheet


def _grid(seen: Sequence[tuple[np.ndarray, VideoPlan]], places: Sequence[Sequence[int]]) -> Image.Image:
    pictures = [
        (pixels, "image" if plan.still else f"{plan.times[index]:.1f} s")
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
        # Small frames stay pixels that can be counted; large ones are smoothed.
        method = Image.Resampling.NEAREST if width >= 2 * wide else Image.Resampling.LANCZOS
        grid.paste(Image.fromarray(pixels).resize(size, method), (left, top))
        draw.rectangle((left, top, left + size[0] - 1, top + height - 1), outline=LINE)
        middle = (left + width / 2, top + height + LABEL / 2 + 1)
        draw.text(middle, label, PALE, _font(SMALL), anchor="mm")
    return grid


def _thumbnail(count: int, shape: float) -> tuple[int, int]:
    for width in reversed(THUMB):
        height = max(1, round(width / shape))
        columns, rows = (GRID[0] + GAP) // (width + GAP), (GRID[1] + GAP) // (height + LABEL + GAP)
        if columns * rows >= count:
            return width, height
    return THUMB[0], max(1, round(THUMB[0] / shape))


def _panel(plans: Sequence[VideoPlan], caption: Caption, shown: int) -> Image.Image:
    panel = _Column(PANEL)
    panel.text(caption.title, SMALL, PALE, lines=2)
    panel.part("Question", caption.question, 12)
    if caption.truth:
        panel.part("Ground truth", caption.truth, 4)
    panel.space(14)
    for plan in plans:
        size, count = f"{plan.width} x {plan.height}", f"{plan.tokens:,} visual tokens"
        if plan.still:
            panel.text(f"an image of {size}, {count}", SMALL, PALE)
            continue
        patch = "a frame" if plan.temporal_patch == 1 else f"for {plan.temporal_patch} frames"
        left_out = f" · {shown} of them shown" if shown < plan.frames else ""
        panel.text(f"{plan.frames} frames of {size}, {plan.fps:.3g} a second{left_out}", SMALL, PALE)
        most = "" if plan.kept is None else "at most "
        panel.text(f"{count}, {most}{plan.tokens_per_frame} {patch}", SMALL, PALE)
    return panel.used()


def _answers(answers: Sequence[Answer], width: int) -> Image.Image:
    shown = answers[:MOST_ANSWERS]
    most = max(1, (width + MARGIN) // (ANSWER + MARGIN))
    across = math.ceil(len(shown) / max(1, math.ceil(len(shown) / most))) or 1
    column = (width + MARGIN) // across - MARGIN
    cells = [_answer(f"Answer {number}", each, column) for number, each in enumerate(shown)]
    rows = [cells[place : place + across] for place in range(0, len(cells), across)]
    heights = [max(cell.height for cell in row) + MARGIN for row in rows]
    left_out = _Column(width)
    if len(shown) < len(answers):
        left_out.text(f"and {len(answers) - len(shown)} more answers", SMALL, PALE)
    image = Image.new("RGB", (width, sum(heights) + left_out.top), PAPER)
    for number, row in enumerate(rows):
        for place, cell in enumerate(row):
            image.paste(cell, (place * (column + MARGIN), sum(heights[:number])))
    image.paste(left_out.used(), (0, sum(heights)))
    return image


def _answer(name: str, answer: Answer, width: int) -> Image.Image:
    cell = _Column(width)
    cell.rule()
    cell.text(f"{name} · reward", SMALL, PALE)
    _reward(cell, answer.reward)
    cell.space(6)
    cell.text(answer.text or "(empty)", NORMAL, INK if answer.text else PALE, lines=16)
    return cell.used()


def _reward(panel: _Column, reward: Reward | RewardFailure | None) -> None:
    if reward is None:
        panel.text("(not scored)", NORMAL, PALE)
    elif isinstance(reward, RewardFailure):
        panel.text(f"failed: {reward.function}: {reward.message}", NORMAL, FAILED, lines=4)
    else:
        panel.text(f"{reward.value:.4g}", LARGE, GOOD if reward.value > 0 else BAD)
        panel.text(" · ".join(f"{name} {part:.3g}" for name, part in reward.parts.items()), SMALL, PALE, lines=3)


class _Column:
    """Text from top to bottom."""

    def __init__(self, width: int):
        self.image = Image.new("RGB", (width, TALLEST), PAPER)
        self.top = 0
        self._draw = ImageDraw.Draw(self.image)

    def used(self) -> Image.Image:
        return self.image.crop((0, 0, self.image.width, self.top))

    def space(self, pixels: int) -> None:
        self.top += pixels

    def rule(self) -> None:
        self.space(10)
        self._draw.line([(0, self.top), (self.image.width, self.top)], LINE)
        self.space(10)

    def part(self, name: str, text: str, lines: int) -> None:
        self.space(14)
        self.text(name, SMALL, PALE)
        self.text(text or "(empty)", NORMAL, INK if text else PALE, lines)

    def text(self, text: str, size: int, colour: str, lines: int = 1) -> None:
        for line in _fitted(_wrapped(text, size, self.image.width), lines):
            self._draw.text((0, self.top), line, colour, _font(size))
            self.space(_step(size))


def _wrapped(text: str, size: int, width: int) -> list[str]:
    length, lines = _font(size).getlength, []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split(" "):
            if line and length(f"{line} {word}") > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
            while length(line) > width:
                most = min(len(line), width)  # letters are wider than a pixel
                cut = 1 + bisect.bisect(range(2, most + 1), width, key=lambda n: length(line[:n]))
                lines.append(line[:cut])
                line = line[cut:]
        lines.append(line)
    return lines


def _fitted(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    if most < 3:
        return [*lines[: most - 1], lines[most - 1][:-1] + "…"]
    head = most // 2
    tail = most - 1 - head
    return [*lines[:head], f"… {len(lines) - head - tail} lines …", *lines[len(lines) - tail :]]


def _step(size: int) -> int:
    return round(size * 1.4)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)
