"""Per-row settings of a clip or image (interval, frames, size) as in qwen-vl-utils, and sizes in whole tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from rlfuse.errors import VideoError

MAX_ASPECT_RATIO = 200
"""Largest ratio of the longer to the shorter side."""


def smart_resize(
    height: int, width: int, cell: int, min_pixels: int, max_pixels: int, frames: int = 1, unit: int = 1
) -> tuple[int, int]:
    """Return the closest size in multiples of `cell` and inside the pixel bounds, as in transformers."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        problem = f"has {width} x {height} pixels; the longer side may be at most {MAX_ASPECT_RATIO} times the shorter"
        raise VideoError(problem, "Crop it, or drop the row")
    rows, columns, counted = round(height / cell), round(width / cell), round(frames / unit) * unit
    if counted * rows * columns * cell**2 > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
    elif counted * rows * columns * cell**2 < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
    return rows * cell, columns * cell


def fit_size(height: int, width: int, level: int, cell: int) -> tuple[int, int]:
    """Return the size with the closest aspect ratio, in multiples of `cell`, of at most `level` cells; not enlarged."""
    scale = min(1.0, math.sqrt(level * cell * cell / (height * width)))
    down, across = height * scale / cell, width * scale / cell

    def unlike(cells: tuple[int, int]) -> tuple[float, int]:
        rows, columns = cells
        return round(abs(math.log(columns / rows * height / width)), 9), -rows * columns

    rows, columns = min(
        (
            (rows, columns)
            for rows in _neighbours(min(down, level))
            for columns in _neighbours(min(across, level // rows))
            if rows * columns <= level
        ),
        key=unlike,
    )
    return rows * cell, columns * cell


def _neighbours(number: float) -> set[int]:
    return {max(1, math.floor(number)), max(1, math.ceil(number))}


MIN_RESIZED_CELLS, MAX_RESIZED_CELLS = 4, 16384
"""qwen-vl-utils' bounds in tokens for `resized_height` x `resized_width`."""
MAX_FRAME_CELLS, MAX_CLIP_CELLS = 768, 0.9 * 128_000
"""qwen-vl-utils' limits on `max_pixels`, in tokens: per frame, and for all frame pairs of a clip."""
FLOATS = ("video_start", "video_end", "fps", "sample_fps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Settings of an image; None: the run's defaults."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    SIZES: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "resized_height")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Create settings from a row's values. ValueError for invalid or contradictory ones."""
        return cls(**{name: _number(name, value) for name, value in given.items()})

    def __post_init__(self) -> None:
        self._check_order("min_pixels", "max_pixels")
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("resized_height and resized_width must be set together. Set both or none")

    def _check_order(self, low: str, high: str) -> None:
        least, most = getattr(self, low), getattr(self, high)
        if None not in (least, most) and least > most:
            raise ValueError(f"{low}={least:g} is above {high}={most:g}. Swap them")

    @property
    def has_size(self) -> bool:
        return any(getattr(self, name) is not None for name in self.SIZES)

    def picture_size(self, height: int, width: int, cell: int, bounds: tuple[float, float, float]) -> tuple[int, int]:
        """Return the size of an image. `bounds`: default minimum and maximum pixels, and a limit on the maximum."""
        least, most, limit = bounds
        if self.resized_height is not None:
            return smart_resize(
                self.resized_height, self.resized_width, cell, MIN_RESIZED_CELLS * cell**2, MAX_RESIZED_CELLS * cell**2
            )
        low = min(least, self.max_pixels or least) if self.min_pixels is None else self.min_pixels
        return smart_resize(height, width, cell, low, max(low, min(self.max_pixels or most, limit)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSettings(ImageSettings):
    """Settings of a clip; None: the run's defaults."""

    total_pixels: int | None = None
    video_start: float | None = None
    """Seconds, clamped to the clip."""
    video_end: float | None = None
    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    sample_fps: float | None = None
    SIZES: ClassVar[tuple[str, ...]] = (*ImageSettings.SIZES, "total_pixels")

    def __post_init__(self) -> None:
        ImageSettings.__post_init__(self)
        self._check_order("min_frames", "max_frames")
        if self.nframes is not None and self.fps is not None:
            raise ValueError(f"nframes={self.nframes} and fps={self.fps:g} exclude each other. Remove one")
        if self.nframes is not None and not (self.min_frames or 0) <= self.nframes <= (self.max_frames or math.inf):
            raise ValueError(f"nframes={self.nframes} is not between min_frames and max_frames. Remove them")
        if None not in (self.video_start, self.video_end) and self.video_start >= self.video_end:
            start, end = f"video_start={self.video_start:g}", f"video_end={self.video_end:g}"
            raise ValueError(f"{start} is not before {end}. Correct them")

    @property
    def has_frames(self) -> bool:
        return any(each is not None for each in (self.fps, self.nframes, self.min_frames, self.max_frames))

    @property
    def is_empty(self) -> bool:
        return self == ClipSettings()

    def frames(
        self, first: int, total: int, rate: float, unit: int, bounds: tuple[float, int, int, float]
    ) -> list[int]:
        """Return the sampled frames of `total` from `first` on, as `smart_nframes` of qwen-vl-utils.

        `rate`: of the file; the count is a multiple of `unit`. `bounds`: default rate, minimum and maximum frames, and
        a limit on all but `nframes`.
        """
        import torch  # lazy: decoder processes import this module; linspace as in qwen-vl-utils

        if self.nframes is not None:
            count = round(self.nframes / unit) * unit
            if not unit <= count <= total:
                raise VideoError(
                    f"nframes={self.nframes} is not between {unit} and the {total} available frames",
                    "Correct nframes, or drop the row",
                )
        else:
            fps, fewest, most, limit = bounds
            fewest = math.ceil((self.min_frames or fewest) / unit) * unit
            count = min(max(total / rate * (self.fps or fps), fewest), self.max_frames or most, limit, total)
            count = math.floor(count / unit) * unit or max(1, int(count))
        return torch.linspace(first, first + total - 1, count).round().int().tolist()

    def frame_size(
        self, height: int, width: int, frames: int, cell: int, unit: int, bounds: tuple[int, int, int]
    ) -> tuple[int, int]:
        """Return the size of each of `frames` frames, `unit` of which share their tokens.

        `bounds`: default minimum and maximum pixels of a frame, and a limit on its tokens.
        """
        least, most, limit = bounds
        floor = int(1.05 * (self.min_pixels or min(least, self.max_pixels or least)))
        total = self.total_pixels or MAX_CLIP_CELLS * cell**2
        limit = max(min(limit * cell**2, total / frames * unit), floor)
        most = limit if self.total_pixels else max(most, floor)
        return self.picture_size(height, width, cell, (least, most, limit))


def _number(name: str, value: Any) -> float:
    whole = name not in FLOATS
    seconds = name in ("video_start", "video_end")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if whole and value == int(value) >= 1:
            return int(value)
        if not whole and (seconds or value > 0):
            return float(value)
    valid = "an integer of at least 1" if whole else "a finite number" + (" of seconds" if seconds else " above 0")
    raise ValueError(f"{name} is {value!r}; valid is {valid}. Correct it")
