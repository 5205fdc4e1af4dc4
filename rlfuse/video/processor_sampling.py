"""Which frames a model's own processor takes of a clip, and how large: by rate and bounds, as it was trained.

Role: a family's sampling (`VideoFamily.sampling`), with what the processor configuration of a checkpoint says. Pure.
Invariant: at a constant rate frames, sizes and token counts are those of transformers' processor of the same settings
with `do_sample_frames`, fewer frames than a temporal patch aside, for which it has no answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from rlfuse.errors import VideoError
from rlfuse.video.plan import Choice, ClipFacts, Geometry, TaskKind

THINNEST = 200
"""Largest ratio of a picture's sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelBounds:
    """Of a picture."""

    min_pixels: int
    max_pixels: int

    def told(self, settings: Mapping[str, Any]) -> Self:
        """With what a processor configuration says."""
        size = settings.get("size") or {}
        named = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        named |= {each.name: settings[each.name] for each in fields(self) if settings.get(each.name) is not None}
        return replace(self, **{name: value for name, value in named.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSampling(PixelBounds):
    """Frames at one rate between two counts, each of a number of pixels between two bounds."""

    fps: float
    min_frames: int
    max_frames: int

    def most_pixels(self, frames: int) -> int:
        """Of each frame of a clip that is shown in so many."""
        return self.max_pixels

    def choose(self, clip: ClipFacts, task: TaskKind, geometry: Geometry) -> Choice:
        """Whatever the task. Pictures that vary in length are spread as `ClipFacts.spread` says."""
        total = clip.distinct_frames
        frames = self.frames(total, clip.fps, geometry.temporal_patch)
        if clip.stills:
            times, fps = clip.spread(len(frames), len(frames) / clip.duration_s)
        else:
            times, fps = [frame / clip.fps for frame in frames], len(frames) / total * clip.fps
        height, width = self.size(clip.height, clip.width, len(times), geometry)
        return Choice(times, fps, height * width // geometry.cell**2, height, width)

    def frames(self, total: int, fps: float, unit: int) -> list[int]:
        """Which frames of a clip that has so many, `fps` a second; as many as fill units where it has as many."""
        import torch  # not above: processes that decode import this file, too, and compute nothing

        most = min(self.max_frames, total) // unit * unit
        count = math.floor(min(max(total / fps * self.fps, self.min_frames), most) / unit) * unit or total
        return torch.arange(0, total, total / count).int().tolist()

    def size(self, height: int, width: int, frames: int, geometry: Geometry) -> tuple[int, int]:
        """Of each frame of a clip of this size that is shown in so many."""
        return within(height, width, geometry.cell, self.min_pixels, self.most_pixels(frames))


def within(
    height: int, width: int, cell: int, min_pixels: int, max_pixels: int, frames: int = 1, unit: int = 1
) -> tuple[int, int]:
    """The size in multiples of `cell` that is nearest to the given one and between the bounds (`smart_resize`), which
    are those of so many frames together, counted in units."""
    if max(height, width) > THINNEST * min(height, width):
        problem = f"is {width} x {height} pixels; the longer side may be {THINNEST} times the shorter at most"
        raise VideoError(problem, "Crop it, or drop the row")
    rows, columns, counted = round(height / cell), round(width / cell), round(frames / unit) * unit
    if counted * rows * columns * cell**2 > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
    elif counted * rows * columns * cell**2 < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
    return rows * cell, columns * cell
