"""Metadata of a clip, known before decoding: duration, size, frame times. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rlfuse.errors import VideoError

# Time stamps have a finite resolution: 128.0000001 s at 1 fps are 128 frames.
_FRAME_SLACK = 1e-6
ROUNDING_S = 0.001
"""Matroska rounds time stamps to milliseconds: 1/24 s becomes 0.042 s."""
MIN_STATIC_S = 0.1
"""Shortest interval without a new frame that matters; no task samples at such a high rate."""


@dataclass(frozen=True, slots=True)
class ClipMetadata:
    """Metadata of a clip."""

    duration_s: float
    fps: float
    """Frame rate of the source; the average if it varies."""
    height: int
    width: int
    """Pixels as displayed, after the container's rotation."""
    frames: int | None = None
    static_intervals: tuple[tuple[float, float], ...] = ()
    """With a variable frame rate: (begin, end) of display of single frames in seconds, in order. All frames if they are
    displayed longer than `MIN_STATIC_S` on average, else only those that are."""
    start_s: float = 0.0
    is_list: bool = False

    def __post_init__(self) -> None:
        for name in ("duration_s", "fps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise VideoError(f"{name} is {value}; it must be finite and positive", "Replace the clip")
        for name in ("height", "width", "frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise VideoError(f"{name} is {value}; it must be at least 1", "Replace the clip")

    @property
    def distinct_frames(self) -> int:
        return self.frames if self.frames is not None else _count(self.duration_s, self.fps)

    @property
    def first_frame(self) -> int:
        return round(self.start_s * self.fps)

    def time_of(self, frame: int) -> float:
        ahead = self.start_s - self.first_frame / self.fps  # non-zero only for a variable rate
        return frame / self.fps + (ahead if abs(ahead) > ROUNDING_S else 0.0)

    def trim(self, start: float | None, end: float | None) -> ClipMetadata:
        """Return the clip from second `start` to `end` as in qwen-vl-utils; VideoError if it has no frame there."""
        if start is None and end is None:
            return self
        longest = self.duration_s if self.static_intervals else self.distinct_frames / self.fps
        begin, stop = (min(max(0.0, at), longest) for at in (start or 0.0, longest if end is None else end))
        first, last = math.ceil(begin * self.fps), min(math.floor(stop * self.fps), self.distinct_frames - 1)
        if begin >= longest or stop <= 0 or not (self.static_intervals or first <= last):
            interval = f"video_start={start}, video_end={end}"
            raise VideoError(f"has no frame in {interval}: it lasts {longest:g} s", "Correct them, or drop the row")
        if not self.static_intervals:
            count = last - first + 1
            return replace(self, frames=count, duration_s=count / self.fps, start_s=first / self.fps)
        kept = ((max(a, begin), min(b, stop)) for a, b in self.static_intervals if a < stop and b > begin)
        static_intervals = tuple((a - begin, b - begin) for a, b in kept)
        frames = len(static_intervals) if self.frames == len(self.static_intervals) else None
        return replace(self, frames=frames, duration_s=stop - begin, start_s=begin, static_intervals=static_intervals)

    def sample_times(self, most: int, fps: float) -> tuple[list[float], float]:
        """Return the times of at most `most` distinct frames at a rate of at most `fps`, and their mean rate."""
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
        """Return 0, 1/fps, 2/fps, ... to the end, without times that show the same frame again."""
        return [round(self.start_s + index / fps, 6) for index in np.flatnonzero(self._news(fps)).tolist()]

    def with_constant_rate(self) -> ClipMetadata:
        """Return the clip with a constant frame rate: longer frames are repeated."""
        return replace(self, fps=1 / MIN_STATIC_S, frames=None, static_intervals=()) if self.static_intervals else self

    def _news(self, fps: float) -> np.ndarray:
        count = _count(self.duration_s, fps)
        if not self.static_intervals:
            return np.ones(count - (count == self.distinct_frames + 1), bool)  # rounding may add one
        begins, ends = np.array(self.static_intervals).T
        times = np.arange(count) / fps + ROUNDING_S
        is_image = np.searchsorted(begins, times, side="right") - 1
        is_image[times >= ends[is_image]] = -1
        return (is_image < 0) | (np.diff(is_image, prepend=-1) != 0)


def _count(duration_s: float, fps: float) -> int:
    return max(1, math.ceil(duration_s * fps - _FRAME_SLACK))
