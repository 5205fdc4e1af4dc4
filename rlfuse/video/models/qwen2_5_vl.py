"""Qwen2.5-VL: temporal patches of two frames, window attention, M-RoPE with absolute time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from rlfuse.video.models.base import Route, VideoFamily, video_family
from rlfuse.video.plan import VideoPlan
from rlfuse.video.positions import MRope
from rlfuse.video.processor_sampling import ProcessorSampling
from rlfuse.video.sharding import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(ProcessorSampling):
    """Sampling of Qwen2.5-VL; `cap_pixels_per_frame` (qwen-vl-utils): frames share 90 % of `max_video_tokens`."""

    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000

    def frame_pixel_limit(self, frames: int) -> int:
        if not self.cap_pixels_per_frame:
            return self.max_pixels
        share = int(self.max_video_tokens * 28**2 * 0.9) * Qwen25VL.temporal_patch // frames
        return max(min(self.max_pixels, share), int(1.05 * self.min_pixels))


@video_family("qwen2_5_vl")
class Qwen25VL(VideoFamily):
    """Qwen2.5-VL."""

    model_class = Qwen2_5_VLForConditionalGeneration
    tower_prefixes = ("visual.",)
    temporal_patch = 2
    route = Route.VIDEO_EMBEDS
    sampling = Sampling(fps=2.0, min_frames=4, max_frames=768, min_pixels=128 * 28**2, max_pixels=768 * 28**2)

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.visual = Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor, merge: int) -> torch.Tensor:
        return self.visual(patches, grid_thw=grid).pooler_output

    @staticmethod
    def cost(config: PreTrainedConfig) -> CostModel:
        """Return the cost of a unit: window attention is linear in patches; the merger takes four patches at once."""
        vision = config.vision_config
        width, layers, full = vision.hidden_size, vision.depth, len(vision.fullatt_block_indexes)
        window = (vision.window_size // vision.patch_size) ** 2
        linear = layers * (4 * width * width + 3 * width * vision.intermediate_size)
        linear += width * (4 * width + vision.out_hidden_size)
        return CostModel(linear + (layers - full) * 2 * width * window, full * 2 * width)

    @staticmethod
    def rope(config: PreTrainedConfig) -> MRope:
        return MRope(config.vision_config.spatial_merge_size, config.vision_config.tokens_per_second)

    @staticmethod
    def grid_inputs(config: PreTrainedConfig, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Add the seconds per temporal patch of a clip in float64, as vLLM uses them; its default would be 1.0."""
        seconds = torch.tensor([plan.seconds_per_temporal_patch], dtype=torch.float64)
        return VideoFamily.grid_inputs(config, plan) | ({} if plan.is_image else {"second_per_grid_ts": seconds})
