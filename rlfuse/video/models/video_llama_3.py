"""VideoLLaMA3: attention within a frame, 2x2 down-sampling, textual timestamps; the text part is a plain Qwen2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, VideoLlama3ForConditionalGeneration
from transformers.models.video_llama_3.modeling_video_llama_3 import VideoLlama3Projector, VideoLlama3VisionModel

from rlfuse.video.models.base import VideoFamily, video_family
from rlfuse.video.plan import Timestamps
from rlfuse.video.processor_sampling import ProcessorSampling
from rlfuse.video.sharding import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(ProcessorSampling):
    """Sampling of VideoLLaMA3: `max_pixels` applies to the whole clip."""

    use_token_compression: bool = True

    def frame_pixel_limit(self, frames: int) -> int:
        return self.max_pixels // frames


@video_family("video_llama_3")
class VideoLlama3(VideoFamily):
    """VideoLLaMA3."""

    model_class = VideoLlama3ForConditionalGeneration
    tower_prefixes = ("vision_model.", "projector.")
    timestamps = Timestamps("Time {:.1f}s:", between=",")
    sampling = Sampling(fps=1.0, min_frames=4, max_frames=180, min_pixels=128 * 28**2, max_pixels=768 * 28**2)
    image_merge = 1

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.vision_model = VideoLlama3VisionModel(config.vision_config)
        self.projector = VideoLlama3Projector(config)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor, merge: int) -> torch.Tensor:
        seen = self.vision_model(patches, grid_thw=grid, merge_sizes=grid.new_tensor([merge]))
        return self.projector(seen.last_hidden_state)

    @staticmethod
    def cost(config: PreTrainedConfig) -> CostModel:
        """Return the cost of a unit: attention spans the frame; the projector sees a quarter of the patches."""
        vision, out = config.vision_config, config.text_config.hidden_size
        width, layers = vision.hidden_size, vision.num_hidden_layers
        linear = layers * (4 * width * width + 2 * width * vision.intermediate_size) + (width + out) * out // 4
        return CostModel(linear, layers * 2 * width)
