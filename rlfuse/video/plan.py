"""Which frames of a clip a model sees, how large, and how many tokens they cost: the only source of truth about it.

Role: `plan_video` turns what is known of a clip, the run's sampling settings and the row's kind of task into a
`VideoPlan`. The decoder decodes it, the tower encodes it, `prompt.assemble` writes it into the prompt; engine and
trainer both check their token counts against it. Pure: no clip is opened here, and nothing here waits.
Invariants:
- a plan never exceeds its sampling's budget, and its tokens are never cut: what the caller can't take is an error;
- times rise (the last is repeated where temporal patches have to be filled up), start at 0 and span the clip;
- with timestamps no picture is shown twice, at variable rates too. Rotary time axes have a single number of seconds for
  all patches: there times stay even, and a picture that stays is shown again;
- everything but times, size and geometry is derived from them, so a plan can't contradict itself;
- equal plans have equal hashes, on every machine and in every process.
Samplings: a model's own is that of its processor (`processor_sampling`). Seed1.5-VL's (arXiv 2505.07062, section on
video encoding) takes 1, 2 or 5 frames a second by task, the largest of six levels of tokens per frame at which all of
them fit into the budget, and where even the smallest does not fit, as many frames as fit, spread evenly over the clip.
A fixed number of frames and tokens is that of MR-SP (arXiv 2507.07966).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from rlfuse.errors import VideoError
from rlfuse.video.timestamps import SEED_TIMES, Timestamps

# Durations come from time stamps of finite resolution: 128.0000001 s at 1 frame a second are 128 frames.
_FRAME_SLACK = 1e-6
ROUNDING_S = 0.001
"""Time stamps were rounded to milliseconds in any clip that was once in Matroska: 1/24 s is 0.042 s there."""
STILL_S = 0.1
"""Shorter stretches of one picture don't matter where there are many: no task asks for as many frames a second."""


class TaskKind(StrEnum):
    """What a question asks of a clip, which decides how densely it has to be sampled."""

    GENERAL = "general"
    DETAIL = "detail"
    """Fine temporal detail."""
    MOTION = "motion"
    """Counting and motion."""


@dataclass(frozen=True, slots=True)
class ClipFacts:
    """What is known of a clip before it is decoded."""

    duration_s: float
    """From the first frame's appearance to the last one's end."""
    fps: float
    """Of the source; the average where the rate varies."""
    height: int
    width: int
    """Pixels as displayed, that is after the rotation that the container asks for."""
    frames: int | None = None
    """None where only decoding would tell."""
    stills: tuple[tuple[float, float], ...] = ()
    """Where the rate varies: from when to when one picture stays, in order. Of all pictures if they stay longer than
    `STILL_S` on average, else of those that do."""

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
        """How many different frames there are to see."""
        return self.frames if self.frames is not None else _count(self.duration_s, self.fps)

    def spread(self, most: int, fps: float) -> tuple[list[float], float]:
        """The times of at most so many pictures over the whole clip, at this rate or below it as little as needed, and
        their rate on average. Of pictures that vary in length those, all of them, where the rate has as many times."""
        if not self.stills:
            fps = fps if len(self._news(fps)) <= most else most / self.duration_s
            return self._times(fps), fps
        if self.frames == len(self.stills) <= min(most, len(self._news(fps))):
            times = [round(begin, 6) for begin, _ in self.stills]
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
        """0, 1/fps, 2/fps, ... to the end, without those that show the picture of the one before."""
        return [round(index / fps, 6) for index in np.flatnonzero(self._news(fps)).tolist()]

    def steady(self) -> ClipFacts:
        """The clip for those to whom every frame lasts as long: while one picture stays, it is repeated."""
        return replace(self, fps=1 / STILL_S, frames=None, stills=()) if self.stills else self

    def _news(self, fps: float) -> np.ndarray:
        """bool: which of 0, 1/fps, 2/fps, ... don't show the picture of the one before."""
        count = _count(self.duration_s, fps)
        if not self.stills:
            return np.ones(count - (count == self.distinct_frames + 1), bool)  # the one too many is of rounding
        begins, ends = np.array(self.stills).T
        times = np.arange(count) / fps + ROUNDING_S
        still = np.searchsorted(begins, times, side="right") - 1
        still[times >= ends[still]] = -1
        return (still < 0) | (np.diff(still, prepend=-1) != 0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the vision tower cuts frames into tokens."""

    patch: int = 14
    """Pixels of a patch's side."""
    merge: int = 2
    """Patches of a token's side."""
    temporal_patch: int = 1
    """Frames that one token spans: 1 for image towers, 2 for Qwen's video towers."""

    def __post_init__(self) -> None:
        for name in ("patch", "merge", "temporal_patch"):
            _at_least_one("Geometry", name, getattr(self, name))

    @property
    def cell(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge


class Choice(NamedTuple):
    """What a sampling shows of a clip."""

    times: list[float]
    fps: float
    level: int
    """Tokens per frame, at most."""
    height: int
    width: int


class Sampling(Protocol):
    """A rule by which clips are sampled."""

    def choose(self, clip: ClipFacts, task: TaskKind, geometry: Geometry) -> Choice:
        """Times, their rate, and the size of every frame."""


@dataclass(frozen=True, slots=True)
class SeedSampling:
    """Seed1.5-VL's sampling. Smaller models take smaller budgets and levels, by these settings alone."""

    budget: int = 81_920
    """Visual tokens of a clip, at most."""
    levels: tuple[int, ...] = (640, 512, 384, 256, 160, 128)
    """Tokens per frame, at most; largest first."""
    fps_general: float = 1.0
    fps_detail: float = 2.0
    fps_motion: float = 5.0

    def __post_init__(self) -> None:
        if not self.levels or list(self.levels) != sorted(set(self.levels), reverse=True) or self.levels[-1] < 1:
            raise ValueError(
                f"SeedSampling.levels: got {self.levels}; valid are whole numbers from 1 up, largest first, none twice"
            )
        if self.budget < self.levels[-1]:
            raise ValueError(
                f"SeedSampling.budget: got {self.budget}, less than one frame at the smallest level, "
                f"{self.levels[-1]}. Raise the budget or add a smaller level."
            )
        for kind in TaskKind:
            if not (math.isfinite(self.fps(kind)) and self.fps(kind) > 0):
                raise ValueError(f"SeedSampling.fps_{kind}: got {self.fps(kind)}; valid is a finite number above 0")

    def fps(self, task: TaskKind) -> float:
        """Frames per second that the task asks for."""
        return {
            TaskKind.GENERAL: self.fps_general,
            TaskKind.DETAIL: self.fps_detail,
            TaskKind.MOTION: self.fps_motion,
        }[task]

    def choose(self, clip: ClipFacts, task: TaskKind, geometry: Geometry) -> Choice:
        """At the task's rate, as large as the budget allows."""
        most = {level: self.budget // level * geometry.temporal_patch for level in self.levels}
        if clip.stills:
            times, fps = clip.spread(most[self.levels[-1]], self.fps(task))
        else:  # no frame is shown twice
            times, fps = clip.spread(min(most[self.levels[-1]], clip.distinct_frames), min(self.fps(task), clip.fps))
        level = next(level for level in self.levels if len(times) <= most[level])
        return Choice(times, fps, level, *fit_size(clip.height, clip.width, level, geometry.cell))


@dataclass(frozen=True, slots=True)
class FixedSampling:
    """As many frames of as many tokens for every clip, spread evenly over it (MR-SP); fewer where it has fewer."""

    frames: int = 128
    tokens_per_frame: int = 256

    def __post_init__(self) -> None:
        _at_least_one("FixedSampling", "frames", self.frames)
        _at_least_one("FixedSampling", "tokens_per_frame", self.tokens_per_frame)

    @property
    def budget(self) -> int:
        """Visual tokens of a clip, at most (with temporal patches of one frame)."""
        return self.frames * self.tokens_per_frame

    def choose(self, clip: ClipFacts, task: TaskKind, geometry: Geometry) -> Choice:
        """As many frames, whatever the task."""
        highest = 1 / STILL_S if clip.stills else clip.distinct_frames / clip.duration_s
        times, fps = clip.spread(self.frames, highest)
        size = fit_size(clip.height, clip.width, self.tokens_per_frame, geometry.cell)
        return Choice(times, fps, self.tokens_per_frame, *size)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the prompt: text, then so many visual tokens."""

    text: str
    tokens: int


@dataclass(frozen=True)
class VideoPlan:
    """The frames of one clip, or the one of an image, as a model sees them."""

    times: tuple[float, ...]
    """Seconds. A time names the frame that is on the screen then."""
    height: int
    width: int
    """Pixels that every frame is resized to; multiples of `geometry.cell`."""
    fps: float
    """Frames per second, as sampled; on average where the clip's own rate varies."""
    level: int
    """Tokens per frame that the sampling allowed."""
    geometry: Geometry = field(default_factory=Geometry)
    timestamps: Timestamps | None = SEED_TIMES
    """How the prompt says the time before every frame; None where it does not."""

    still: bool = False
    """Of an image, whose frame is repeated to fill a temporal patch."""

    def __post_init__(self) -> None:
        assert self.times and len(self.times) % self.geometry.temporal_patch == 0
        assert self.height % self.geometry.cell == 0 == self.width % self.geometry.cell
        assert 1 <= self.tokens_per_frame <= self.level

    @property
    def frames(self) -> int:
        """How many frames are decoded."""
        return len(self.times)

    @property
    def modality(self) -> str:
        return "image" if self.still else "video"

    @property
    def merge(self) -> int:
        return self.geometry.merge

    @property
    def temporal_patch(self) -> int:
        return self.geometry.temporal_patch

    @property
    def temporal_patches(self) -> int:
        """How many stretches of visual tokens there are: one for every frame with temporal patches of one frame."""
        return self.frames // self.temporal_patch

    @property
    def tokens_per_frame(self) -> int:
        """Visual tokens of one temporal patch, which is one frame for image towers."""
        return (self.height // self.geometry.cell) * (self.width // self.geometry.cell)

    @property
    def tokens(self) -> int:
        """Visual tokens of the whole clip."""
        return self.temporal_patches * self.tokens_per_frame

    @property
    def grid(self) -> tuple[int, int, int]:
        """Temporal patches, and patches down and across: Qwen's `video_grid_thw`."""
        return self.temporal_patches, self.height // self.geometry.patch, self.width // self.geometry.patch

    @property
    def seconds_per_temporal_patch(self) -> float:
        """Qwen2.5-VL's `second_per_grid_ts`."""
        return self.temporal_patch / self.fps

    @property
    def patch_times(self) -> list[float]:
        """Of every temporal patch, the mean of its frames' times."""
        size = self.temporal_patch
        return [math.fsum(self.times[start : start + size]) / size for start in range(0, self.frames, size)]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The prompt's part for this clip: before the tokens of every temporal patch its time; one wordless piece
        without timestamps."""
        if self.timestamps is None:
            return (Piece("", self.tokens),)
        return tuple(Piece(text, self.tokens_per_frame) for text in self.timestamps.texts(self.patch_times))

    @property
    def behind(self) -> str:
        """The prompt's part behind the last piece."""
        return self.timestamps.behind if self.timestamps else ""

    @cached_property
    def hash(self) -> str:
        """32 hexadecimal digits over what the tower's output depends on: times, to the microsecond, size, geometry, and
        how it is read."""
        microseconds = [round(time * 1e6) for time in self.times]
        shape = (self.height, self.width, self.geometry.patch, self.geometry.merge, self.geometry.temporal_patch)
        seen = (microseconds, shape, "still") if self.still else (microseconds, shape)
        return hashlib.blake2b(repr(seen).encode(), digest_size=16).hexdigest()


def plan_video(
    clip: ClipFacts,
    sampling: Sampling,
    task: TaskKind | str = TaskKind.GENERAL,
    geometry: Geometry | None = None,
    *,
    timestamps: Timestamps | None = SEED_TIMES,
) -> VideoPlan:
    """The plan of one clip."""
    geometry = geometry or Geometry()
    seen = clip if timestamps else clip.steady()
    times, fps, level, height, width = sampling.choose(seen, _task(task), geometry)
    times += times[-1:] * (-len(times) % geometry.temporal_patch)
    return VideoPlan(tuple(times), height, width, fps, level, geometry, timestamps)


def fit_size(height: int, width: int, level: int, cell: int) -> tuple[int, int]:
    """The size nearest in shape to `height` x `width`, in multiples of `cell`, of at most `level` cells. Never more
    than a cell larger than the source on either side: enlarging adds tokens and no detail."""
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
    """The whole numbers around one, from 1 up."""
    return {max(1, math.floor(number)), max(1, math.ceil(number))}


def _count(duration_s: float, fps: float) -> int:
    """How many of the times 0, 1/fps, 2/fps, ... lie before the end."""
    return max(1, math.ceil(duration_s * fps - _FRAME_SLACK))


def _task(task: TaskKind | str) -> TaskKind:
    try:
        return TaskKind(task)
    except ValueError:
        raise ValueError(f"task: got {task!r}; valid are {', '.join(TaskKind)}. Correct the row's kind.") from None


def _at_least_one(owner: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{owner}.{name}: got {value}; valid is 1 or more")
