"""Facts of a clip that are known before decoding: duration, size, and when its pictures change. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rlfuse.errors import VideoError

# Durations come from time stamps of finite resolution: 128.0000001 s at 1 frame a second are 128 frames.
_FRAME_SLACK = 1e-6
ROUNDING_S = 0.001
"""Time stamps were rounded to milliseconds in any clip that was once in Matroska: 1/24 s is 0.042 s there."""
MIN_STATIC_S = 0.1
"""Shorter stretches of one picture don't matter where there are many: no task asks for as many frames a second."""


@dataclass(frozen=True, slots=True)
class ClipMetadata:
    """What is known of a clip before it is decoded."""

    duration_s: float
    fps: float
    """Of the source; the average where the rate varies."""
    height: int
    width: int
    """Pixels as displayed, that is after the rotation that the container asks for."""
    frames: int | None = None
    static_intervals: tuple[tuple[float, float], ...] = ()
    """Where the rate varies: from when to when one picture stays, in order. Of all pictures if they stay longer than
    `MIN_STATIC_S` on average, else of those that do."""
    start_s: float = 0.0
    is_list: bool = False

    def __post_init__(self) -> None:
        for name in ("duration_s", "fps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise VideoError(f"{name} is {value}; valid is a finite number above 0", "Replace the clip")
        for name in ("height", "width", "frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise VideoError(f"{name} is {value}; valid is 1 or more", "Replace the clip")

    @property
    def distinct_frames(self) -> int:
        return self.frames if self.frames is not None else _count(self.duration_s, self.fps)

    @property
    def first_frame(self) -> int:
        return round(self.start_s * self.fps)

    def time_of(self, frame: int) -> float:
        ahead = self.start_s - self.first_frame / self.fps  # only where the rate varies around the part
        return frame / self.fps + (ahead if abs(ahead) > ROUNDING_S else 0.0)

    def trim(self, start: float | None, end: float | None) -> ClipMetadata:
        """The clip from second `start` to `end`, as qwen-vl-utils cuts it; VideoError where it has no frame there."""
        if start is None and end is None:
            return self
        longest = self.duration_s if self.static_intervals else self.distinct_frames / self.fps
        begin, stop = (min(max(0.0, at), longest) for at in (start or 0.0, longest if end is None else end))
        first, last = math.ceil(begin * self.fps), min(math.floor(stop * self.fps), self.distinct_frames - 1)
        if begin >= longest or stop <= 0 or not (self.static_intervals or first <= last):
            asked = f"video_start={start}, video_end={end}"
            raise VideoError(f"has no frame in {asked}: it lasts {longest:g} s", "Correct them, or drop the row")
        if not self.static_intervals:
            count = last - first + 1
            return replace(self, frames=count, duration_s=count / self.fps, start_s=first / self.fps)
        kept = ((max(a, begin), min(b, stop)) for a, b in self.static_intervals if a < stop and b > begin)
        static_intervals = tuple((a - begin, b - begin) for a, b in kept)
        frames = len(static_intervals) if self.frames == len(self.static_intervals) else None
        return replace(self, frames=frames, duration_s=stop - begin, start_s=begin, static_intervals=static_intervals)

    def sample_times(self, most: int, fps: float) -> tuple[list[float], float]:
        """Return times of at most so many pictures at this rate or below, and their mean rate."""
        if not self.static_intervals:
            fps = fps if len(self._news(fps)) <= most else most / self.duration_s
            return self._times(fps), fps
        if self.frames == len(self.static_intervals) <= min(most, len(self._news(fps))):
            times = [round(self.start_s + begin, 6) for begin, _ in self.static_intervals]
        elif self._news(fps).sum() <= most:
            times = self._times(fps)
        else:
            fewer, more = most, len(self._news(fps))
            while more - fewer > 1:
                middle = (fewer + more) // 2
                fits = self._news(middle / self.duration_s).sum() <= most
                fewer, more = (middle, more) if fits else (fewer, middle)
            times = self._times(fewer / self.duration_s)
        return times, len(times) / self.duration_s

    def _times(self, fps: float) -> list[float]:
        """Return 0, 1/fps, 2/fps, ... to the end, without repeated pictures."""
        return [round(self.start_s + index / fps, 6) for index in np.flatnonzero(self._news(fps)).tolist()]

    def with_constant_rate(self) -> ClipMetadata:
        """The clip for those to whom every frame lasts as long: while one picture stays, it is repeated."""
        return replace(self, fps=1 / MIN_STATIC_S, frames=None, static_intervals=()) if self.static_intervals else self

    def _news(self, fps: float) -> np.ndarray:
        count = _count(self.duration_s, fps)
        if not self.static_intervals:
            return np.ones(count - (count == self.distinct_frames + 1), bool)  # the one too many is of rounding
        begins, ends = np.array(self.static_intervals).T
        times = np.arange(count) / fps + ROUNDING_S
        is_image = np.searchsorted(begins, times, side="right") - 1
        is_image[times >= ends[is_image]] = -1
        return (is_image < 0) | (np.diff(is_image, prepend=-1) != 0)


def _count(duration_s: float, fps: float) -> int:
    return max(1, math.ceil(duration_s * fps - _FRAME_SLACK))
