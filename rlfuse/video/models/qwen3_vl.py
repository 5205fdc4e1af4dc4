"""Qwen3-VL: temporal patches of two frames with a timestamp each, DeepStack features (arXiv 2406.04334)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig, Qwen3VLForConditionalGeneration, Qwen3VLVisionModel

from rlfuse.samples import Visual
from rlfuse.video.media_settings import smart_resize
from rlfuse.video.models.base import Route, VideoFamily, video_family
from rlfuse.video.plan import Geometry, Timestamps, VideoPlan
from rlfuse.video.positions import MRope
from rlfuse.video.processor_sampling import ProcessorSampling
from rlfuse.video.sharding import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(ProcessorSampling):
    """Sampling of Qwen3-VL: pixel bounds apply to the whole clip; the last frame is always sampled."""

    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768
    """Token limit of a frame with `cap_pixels_per_frame`."""

    def frames(self, total: int, fps: float, unit: int) -> list[int]:
        count = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()

    def size(self, height: int, width: int, frames: int, geometry: Geometry) -> tuple[int, int]:
        cell, frames = geometry.cell, max(frames, geometry.temporal_patch)
        most = self._most_of_clip(frames, cell)
        if min(height, width) < cell:
            scale = max(cell / height, cell / width)
            height, width = int(height * scale), int(width * scale)
        return smart_resize(height, width, cell, self.min_pixels, most, frames, geometry.temporal_patch)

    def frame_bounds(self, frames: int, geometry: Geometry) -> tuple[int, int]:
        return self.min_pixels // frames, self._most_of_clip(frames, geometry.cell) // frames

    def _most_of_clip(self, frames: int, cell: int) -> int:
        if not self.cap_pixels_per_frame:
            return self.max_pixels
        share = min(self.max_video_tokens * cell**2, self.max_pixels // frames)
        return max(share, int(1.05 * self.min_pixels)) * frames


@video_family("qwen3_vl")
class Qwen3VL(VideoFamily):
    """Qwen3-VL."""

    model_class = Qwen3VLForConditionalGeneration
    tower_prefixes = ("visual.",)
    temporal_patch = 2
    route = Route.VIDEO_EMBEDS
    timestamps = Timestamps("<{:.1f} seconds><|vision_start|>", between="<|vision_end|>", behind="<|vision_end|>")
    sampling = Sampling(fps=2.0, min_frames=4, max_frames=768, min_pixels=128 * 32**2, max_pixels=768 * 32**2)

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.visual = Qwen3VLVisionModel(config.vision_config)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor, merge: int) -> torch.Tensor:
        seen = self.visual(patches, grid_thw=grid)
        return torch.cat([seen.pooler_output, *seen.deepstack_features], dim=-1)

    @staticmethod
    def deepstack_layers(config: PreTrainedConfig) -> int:
        return len(config.vision_config.deepstack_visual_indexes)

    @staticmethod
    def cost(config: PreTrainedConfig) -> CostModel:
        """Return the cost of a unit: attention spans it; each merger takes four patches."""
        vision = config.vision_config
        width, layers, mergers = vision.hidden_size, vision.depth, 1 + Qwen3VL.deepstack_layers(config)
        linear = layers * (4 * width * width + 2 * width * vision.intermediate_size)
        linear += mergers * width * (4 * width + vision.out_hidden_size)
        return CostModel(linear, layers * 2 * width)

    @staticmethod
    def rope(config: PreTrainedConfig) -> MRope:
        return MRope(config.vision_config.spatial_merge_size, None)

    @staticmethod
    def grid_inputs(config: PreTrainedConfig, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Add the times of a clip, from which vLLM writes exactly the timestamps of this prompt."""
        times = torch.tensor([plan.patch_times], dtype=torch.float64)
        return VideoFamily.grid_inputs(config, plan) | ({} if plan.is_image else {"timestamps": times})

    @staticmethod
    def engine_written_span(config: PreTrainedConfig, ids: np.ndarray, visual: Visual) -> tuple[int, int]:
        """Return the span of a clip including timestamps and the vision start and end tokens."""
        first, behind = VideoFamily.engine_written_span(config, ids, visual)
        if visual.plan.is_image:
            return first, behind
        around = np.flatnonzero(ids[: first - 1] == config.vision_start_token_id)
        return int(around.max(initial=-1)) + 1, behind + 1
