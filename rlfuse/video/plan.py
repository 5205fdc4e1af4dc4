"""Plan the frames of a clip that a model sees, their size, and their number of tokens. Pure.

Decoder, tower, prompt, engine and trainer all use the plan. It never exceeds the sampling's budget, and equal plans
have equal hashes on every machine. Samplings: a model's own (`processor_sampling`); Seed1.5-VL's (arXiv 2505.07062: 1,
2 or 5 frames a second by task, the largest of six levels of tokens per frame that fits); a fixed number of frames and
tokens (MR-SP, arXiv 2507.07966).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

from rlfuse.errors import VideoError
from rlfuse.video.clip_metadata import MIN_STATIC_S, ClipMetadata
from rlfuse.video.media_settings import ClipSettings, fit_size


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Format of timestamps in prompts, before the tokens of a temporal patch."""

    template: str
    between: str = ""
    behind: str = ""

    def texts(self, seconds: Sequence[float]) -> list[str]:
        return [(self.between if i else "") + self.template.format(each) for i, each in enumerate(seconds)]


SEED_TIMES = Timestamps("[{:.1f} second]")


class TaskKind(StrEnum):
    """Kind of question about a clip, which decides the sampling rate."""

    GENERAL = "general"
    DETAIL = "detail"
    MOTION = "motion"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Patch sizes by which the vision tower divides frames into tokens."""

    patch: int = 14
    merge: int = 2
    temporal_patch: int = 1

    def __post_init__(self) -> None:
        for name in ("patch", "merge", "temporal_patch"):
            _at_least_one("Geometry", name, getattr(self, name))

    @property
    def cell(self) -> int:
        return self.patch * self.merge


class SampledFrames(NamedTuple):
    """Result of a sampling: frame times, their rate, and the size of the frames."""

    times: list[float]
    fps: float
    level: int
    height: int
    width: int

    def tokens(self, geometry: Geometry) -> int:
        return self.height * self.width // geometry.cell**2


class Sampling(Protocol):
    """Protocol of a sampling."""

    def choose(self, clip: ClipMetadata, task: TaskKind, geometry: Geometry, settings: ClipSettings) -> SampledFrames:
        """Return times, rate and frame size. `settings`: of the row; `clip` is already cut to their interval."""


@dataclass(frozen=True, slots=True)
class SeedSampling:
    """Seed1.5-VL's sampling; the defaults are the paper's."""

    budget: int = 81_920
    levels: tuple[int, ...] = (640, 512, 384, 256, 160, 128)
    fps_general: float = 1.0
    fps_detail: float = 2.0
    fps_motion: float = 5.0

    def __post_init__(self) -> None:
        if not self.levels or list(self.levels) != sorted(set(self.levels), reverse=True) or self.levels[-1] < 1:
            raise ValueError(
                f"SeedSampling.levels: got {self.levels}; valid are distinct positive integers in descending order"
            )
        if self.budget < self.levels[-1]:
            raise ValueError(
                f"SeedSampling.budget: got {self.budget}, less than one frame at the smallest level, "
                f"{self.levels[-1]}. Raise the budget or add a smaller level."
            )
        for kind in TaskKind:
            if not (math.isfinite(self.fps(kind)) and self.fps(kind) > 0):
                raise ValueError(f"SeedSampling.fps_{kind}: got {self.fps(kind)}; it must be finite and positive")

    def fps(self, task: TaskKind) -> float:
        return {TaskKind.GENERAL: self.fps_general, TaskKind.DETAIL: self.fps_detail, TaskKind.MOTION: self.fps_motion}[
            task
        ]

    def choose(self, clip: ClipMetadata, task: TaskKind, geometry: Geometry, settings: ClipSettings) -> SampledFrames:
        most = {level: self.budget // level * geometry.temporal_patch for level in self.levels}
        longest = most[self.levels[-1]]
        if settings.has_frames or clip.is_list:
            times, fps = requested_times(clip, geometry, settings, (self.fps(task), 1, longest, longest))
        elif clip.static_intervals:
            times, fps = clip.sample_times(longest, self.fps(task))
        else:  # no frame is shown twice
            times, fps = clip.sample_times(min(longest, clip.distinct_frames), min(self.fps(task), clip.fps))
        level = next((level for level in self.levels if len(times) <= most[level]), self.levels[-1])
        choice = _sized(clip, times, fps, level, geometry, settings)
        if (tokens := math.ceil(len(times) / geometry.temporal_patch) * choice.tokens(geometry)) > self.budget:
            problem = f"has {tokens} visual tokens with the settings of its row; video.max_tokens is {self.budget}"
            raise VideoError(problem, "Lower nframes, min_pixels or the resized sides, or raise video.max_tokens")
        return choice


@dataclass(frozen=True, slots=True)
class FixedSampling:
    """A fixed number of evenly spaced frames with a fixed token limit (MR-SP); fewer if the clip has fewer."""

    frames: int = 128
    tokens_per_frame: int = 256

    def __post_init__(self) -> None:
        _at_least_one("FixedSampling", "frames", self.frames)
        _at_least_one("FixedSampling", "tokens_per_frame", self.tokens_per_frame)

    @property
    def budget(self) -> int:
        return self.frames * self.tokens_per_frame

    def choose(self, clip: ClipMetadata, task: TaskKind, geometry: Geometry, settings: ClipSettings) -> SampledFrames:
        if settings.has_frames or clip.is_list:
            bounds = self.frames / clip.duration_s, 1, self.frames, math.inf
            times, fps = requested_times(clip, geometry, settings, bounds)
        else:
            highest = 1 / MIN_STATIC_S if clip.static_intervals else clip.distinct_frames / clip.duration_s
            times, fps = clip.sample_times(self.frames, highest)
        return _sized(clip, times, fps, self.tokens_per_frame, geometry, settings)


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of the prompt: text, then a number of visual tokens."""

    text: str
    tokens: int


@dataclass(frozen=True)
class VideoPlan:
    """Frames of a clip, or the one frame of an image, as the model sees them."""

    times: tuple[float, ...]
    """Seconds; each selects the frame that is displayed then."""
    height: int
    width: int
    fps: float
    level: int
    geometry: Geometry = field(default_factory=Geometry)
    timestamps: Timestamps | None = SEED_TIMES
    """Format of the timestamps in the prompt; None: no timestamps."""

    is_image: bool = False
    """True for an image, whose frame is repeated to fill a temporal patch."""
    kept: bytes | None = None
    """Mask of kept visual tokens, one byte each, see `compress_tokens`; None: all are kept."""

    def __post_init__(self) -> None:
        assert self.kept is None or len(self.kept) == self.temporal_patches * self.tokens_per_frame
        assert self.times and len(self.times) % self.geometry.temporal_patch == 0
        assert self.height % self.geometry.cell == 0 == self.width % self.geometry.cell
        assert 1 <= self.tokens_per_frame <= self.level

    @property
    def frames(self) -> int:
        return len(self.times)

    @property
    def modality(self) -> str:
        return "image" if self.is_image else "video"

    @property
    def merge(self) -> int:
        return self.geometry.merge

    @property
    def temporal_patch(self) -> int:
        return self.geometry.temporal_patch

    @property
    def temporal_patches(self) -> int:
        """Number of temporal patches."""
        return self.frames // self.temporal_patch

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one temporal patch (one frame for image towers), before compression (`kept`)."""
        return (self.height // self.geometry.cell) * (self.width // self.geometry.cell)

    @property
    def tokens(self) -> int:
        return self.temporal_patches * self.tokens_per_frame if self.kept is None else self.kept.count(1)

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
        """Mean time of the frames of each temporal patch, in seconds."""
        size = self.temporal_patch
        return [math.fsum(self.times[start : start + size]) / size for start in range(0, self.frames, size)]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces of the prompt: a timestamp before each temporal patch, or one piece without timestamps."""
        if self.timestamps is None:
            return (Piece("", self.tokens),)
        each, texts = self.tokens_per_frame, self.timestamps.texts(self.patch_times)
        kept = self.kept or bytes([1]) * (each * self.temporal_patches)
        return tuple(Piece(text, kept.count(1, at * each, (at + 1) * each)) for at, text in enumerate(texts))

    @property
    def behind(self) -> str:
        return self.timestamps.behind if self.timestamps else ""

    @cached_property
    def hash(self) -> str:
        """Hash of everything that the tower's output depends on, 32 hexadecimal digits."""
        microseconds = [round(time * 1e6) for time in self.times]
        shape = (self.height, self.width, self.geometry.patch, self.geometry.merge, self.geometry.temporal_patch)
        seen = (microseconds, shape, *["still"] * self.is_image, *[self.kept] * (self.kept is not None))
        return hashlib.blake2b(repr(seen).encode(), digest_size=16).hexdigest()


def plan_video(
    clip: ClipMetadata,
    sampling: Sampling,
    task: TaskKind | str = TaskKind.GENERAL,
    geometry: Geometry | None = None,
    *,
    timestamps: Timestamps | None = SEED_TIMES,
    settings: ClipSettings | None = None,
) -> VideoPlan:
    """Plan one clip; `settings`: of its row."""
    geometry, settings = geometry or Geometry(), settings or ClipSettings()
    seen = (clip if timestamps else clip.with_constant_rate()).trim(settings.video_start, settings.video_end)
    times, fps, level, height, width = sampling.choose(seen, _task(task), geometry, settings)
    times += times[-1:] * (-len(times) % geometry.temporal_patch)
    return VideoPlan(tuple(times), height, width, fps, level, geometry, timestamps)


def requested_times(
    clip: ClipMetadata, geometry: Geometry, settings: ClipSettings, bounds: tuple[float, int, int, float]
) -> tuple[list[float], float]:
    """Return times and rate of the frames requested by `settings`; `bounds`: see `ClipSettings.frames`."""
    total, unit = clip.distinct_frames, 1 if clip.is_list else geometry.temporal_patch
    bounds = (clip.fps, 1, total, bounds[3]) if clip.is_list else bounds
    frames = settings.frames(clip.first_frame, total, clip.fps, unit, bounds)
    if clip.static_intervals:
        return clip.sample_times(len(frames), len(frames) / clip.duration_s)
    return [clip.time_of(frame) for frame in frames], len(frames) / total * clip.fps


def _sized(
    clip: ClipMetadata, times: list[float], fps: float, level: int, geometry: Geometry, settings: ClipSettings
) -> SampledFrames:
    if not settings.has_size:
        return SampledFrames(times, fps, level, *fit_size(clip.height, clip.width, level, geometry.cell))
    cell, unit = geometry.cell, geometry.temporal_patch
    bounds = cell**2, level * cell**2, level
    size = settings.frame_size(clip.height, clip.width, len(times), cell, unit, bounds)
    choice = SampledFrames(times, fps, level, *size)
    return choice._replace(level=max(level, choice.tokens(geometry)))


def _task(task: TaskKind | str) -> TaskKind:
    try:
        return TaskKind(task)
    except ValueError:
        raise ValueError(f"task: got {task!r}; valid are {', '.join(TaskKind)}. Correct the row's task.") from None


def _at_least_one(owner: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{owner}.{name}: got {value}; it must be at least 1")
