"""Sample frames as in a model's processor, by rate and pixel bounds. Pure.

For a constant frame rate, frames, sizes and token counts equal those of the installed transformers' processor with
`do_sample_frames`; with per-row settings they equal those of qwen-vl-utils.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from rlfuse.video.clip_metadata import ClipMetadata
from rlfuse.video.media_settings import MAX_FRAME_CELLS, ClipSettings, smart_resize
from rlfuse.video.plan import Geometry, SampledFrames, TaskKind, requested_times


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelBounds:
    """Minimum and maximum pixels of an image."""

    min_pixels: int
    max_pixels: int

    def with_processor_settings(self, settings: Mapping[str, Any]) -> Self:
        size = settings.get("size") or {}
        named = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        named |= {each.name: settings[each.name] for each in fields(self) if settings.get(each.name) is not None}
        return replace(self, **{name: value for name, value in named.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSampling(PixelBounds):
    """Sampling at a fixed rate, with bounds on the number of frames and on their pixels."""

    fps: float
    min_frames: int
    max_frames: int

    def frame_pixel_limit(self, frames: int) -> int:
        return self.max_pixels

    def frame_bounds(self, frames: int, geometry: Geometry) -> tuple[int, int]:
        return self.min_pixels, self.frame_pixel_limit(frames)

    def choose(self, clip: ClipMetadata, task: TaskKind, geometry: Geometry, settings: ClipSettings) -> SampledFrames:
        """Sample a clip, independently of the task. With a variable frame rate: see `ClipMetadata.sample_times`."""
        total = clip.distinct_frames
        if clip.is_list or not settings.is_empty:
            times, fps = requested_times(
                clip, geometry, settings, (self.fps, self.min_frames, self.max_frames, math.inf)
            )
        else:
            frames = self.frames(total, clip.fps, geometry.temporal_patch)
            times, fps = [frame / clip.fps for frame in frames], len(frames) / total * clip.fps
            if clip.static_intervals:
                times, fps = clip.sample_times(len(frames), len(frames) / clip.duration_s)
        if settings.has_size:
            bounds = *self.frame_bounds(len(times), geometry), MAX_FRAME_CELLS
            cell, unit = geometry.cell, geometry.temporal_patch
            height, width = settings.frame_size(clip.height, clip.width, len(times), cell, unit, bounds)
        else:
            height, width = self.size(clip.height, clip.width, len(times), geometry)
        return SampledFrames(times, fps, height * width // geometry.cell**2, height, width)

    def frames(self, total: int, fps: float, unit: int) -> list[int]:
        """Return the sampled frames of `total` at `fps`; their number is a multiple of `unit` if there are enough."""
        import torch  # lazy: decoder processes import this module

        most = min(self.max_frames, total) // unit * unit
        count = math.floor(min(max(total / fps * self.fps, self.min_frames), most) / unit) * unit or total
        return torch.arange(0, total, total / count).int().tolist()

    def size(self, height: int, width: int, frames: int, geometry: Geometry) -> tuple[int, int]:
        return smart_resize(height, width, geometry.cell, self.min_pixels, self.frame_pixel_limit(frames))
