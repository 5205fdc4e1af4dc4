"""Settings of a row for one clip or image (part, frames, size) as in qwen-vl-utils, and sizes in whole tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from rlfuse.errors import VideoError

MAX_ASPECT_RATIO = 200
"""Largest ratio of a picture's sides."""


def smart_resize(
    height: int, width: int, cell: int, min_pixels: int, max_pixels: int, frames: int = 1, unit: int = 1
) -> tuple[int, int]:
    """Return the multiple of `cell` nearest to the size and within the bounds (`smart_resize`)."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        problem = f"is {width} x {height} pixels; the longer side may be {MAX_ASPECT_RATIO} times the shorter at most"
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
    """Return the size nearest in shape, in multiples of `cell`, of at most `level` cells, without enlarging."""
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
"""Tokens between which qwen-vl-utils resizes to `resized_height` and `resized_width`."""
MAX_FRAME_CELLS, MAX_CLIP_CELLS = 768, 0.9 * 128_000
"""Tokens of a frame, and of all pairs of frames of a clip, that `max_pixels` can't exceed in qwen-vl-utils."""
FLOATS = ("video_start", "video_end", "fps", "sample_fps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Of an image; null: the run decides."""

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
        """Settings with these values. ValueError for one that is out of range or contradicts another."""
        return cls(**{name: _number(name, value) for name, value in given.items()})

    def __post_init__(self) -> None:
        self._check_order("min_pixels", "max_pixels")
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("resized_height and resized_width belong together. Give both or none")

    def _check_order(self, low: str, high: str) -> None:
        least, most = getattr(self, low), getattr(self, high)
        if None not in (least, most) and least > most:
            raise ValueError(f"{low}={least:g} is above {high}={most:g}. Swap them")

    @property
    def has_size(self) -> bool:
        return any(getattr(self, name) is not None for name in self.SIZES)

    def picture_size(self, height: int, width: int, cell: int, bounds: tuple[float, float, float]) -> tuple[int, int]:
        """The size of an image; `bounds`: least and most pixels where its row does not say, and a limit of `max_pixels`
        and of what the run decides."""
        least, most, limit = bounds
        if self.resized_height is not None:
            return smart_resize(
                self.resized_height, self.resized_width, cell, MIN_RESIZED_CELLS * cell**2, MAX_RESIZED_CELLS * cell**2
            )
        low = min(least, self.max_pixels or least) if self.min_pixels is None else self.min_pixels
        return smart_resize(height, width, cell, low, max(low, min(self.max_pixels or most, limit)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSettings(ImageSettings):
    """Of a clip."""

    total_pixels: int | None = None
    video_start: float | None = None
    """Seconds; what lies outside of the clip is cut off."""
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
            raise ValueError(f"nframes={self.nframes} is not between min_frames and max_frames. Remove these")
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
        """The frames taken of `total` from `first` on, at `rate` in the file, in multiples of `unit` (`smart_nframes`).

        `bounds`: rate, fewest and most frames where the row does not say, and a limit of all but `nframes`.
        """
        import torch  # its linspace, as in qwen-vl-utils; not above: processes that decode import this file, too

        if self.nframes is not None:
            count = round(self.nframes / unit) * unit
            if not unit <= count <= total:
                raise VideoError(
                    f"nframes={self.nframes} is not between {unit} and the {total} frames that there are to take",
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
        """The size of each of so many frames, `unit` of which share their tokens.

        `bounds`: least and most pixels of a frame where the row does not say, and the limit of its tokens.
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
    valid = "a whole number from 1 up" if whole else "a finite number" + (" of seconds" if seconds else " above 0")
    raise ValueError(f"{name} is {value!r}; valid is {valid}. Correct it")
