"""Properties of a video model that the driver needs at startup. An unsupported model is an error."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from rlfuse.errors import VideoError
from rlfuse.video.checkpoints import join_checkpoint
from rlfuse.video.models.base import Route, VideoFamily, family_of, known_families
from rlfuse.video.plan import Geometry, VideoPlan
from rlfuse.video.processor_sampling import PixelBounds, ProcessorSampling
from rlfuse.video.prompt import VideoPrompt, VisualTokens, assemble
from rlfuse.video.towers import image_settings, processor_settings
from rlfuse.video.vllm_route import unknown_family_message


def supported_family(config: PreTrainedConfig) -> type[VideoFamily] | None:
    """Return the family of the model; None for a text-only model. VideoError if it is not supported."""
    if getattr(config, "vision_config", None) is None:
        return None
    if (family := family_of(config)) is None:
        why = unknown_family_message(config.model_type)
        raise VideoError(f"a {config.model_type} model can't be used: {why}", f"Use one of {known_families()}")
    return family


@dataclass(frozen=True, slots=True)
class VideoModel:
    """Video model: tower and text part."""

    folder: str
    geometry: Geometry
    visual: VisualTokens
    frame: tuple[str, str]
    """Special tokens before and after a clip; may be empty."""
    family: type[VideoFamily]

    @classmethod
    def from_pretrained(cls, folder: str, trust_remote_code: bool = False) -> VideoModel | None:
        """Return the model of this folder or hub name; None for a text-only model. VideoError if not supported."""
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if (family := supported_family(config)) is None:
            return None
        if not Path(folder).is_dir():
            folder = snapshot_download(folder)
        vision = config.vision_config
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)

        def word(name: str) -> str:
            token = getattr(config, name, None)
            return "" if token is None else tokenizer.convert_ids_to_tokens(token)

        return cls(
            folder,
            Geometry(vision.patch_size, family.merge, family.temporal_patch),
            VisualTokens(word("video_token_id"), word("image_token_id")),
            (word("vision_start_token_id"), word("vision_end_token_id")),
            family,
        )

    @property
    def sampling(self) -> ProcessorSampling:
        return self.family.sampling.with_processor_settings(processor_settings(Path(self.folder)))

    def image_sizes(self, most_tokens: int | None) -> tuple[PixelBounds, Geometry]:
        """Return the pixel bounds and geometry of images in the model's processor, limited to `most_tokens` each."""
        settings = image_settings(Path(self.folder))
        geometry = replace(self.geometry, merge=settings.get("merge_size", self.family.image_merge))
        bounds = self.family.image_bounds.with_processor_settings(settings)
        if most_tokens is not None:
            most = min(bounds.max_pixels, most_tokens * geometry.cell**2)
            bounds = PixelBounds(min_pixels=min(bounds.min_pixels, most), max_pixels=most)
        return bounds, geometry

    def servable_folder(self, folder: Path, head: torch.nn.Linear | None = None) -> str:
        """Return the folder that engines and trainers load: the whole model, or its text part written to `folder`."""
        if self.family.route is Route.VIDEO_EMBEDS:
            return self.folder
        if not (folder / "tokenizer_config.json").exists():  # written last
            self.family.export(self.folder, folder, head)
        return str(folder)

    def complete(self, folder: Path) -> None:
        whole = folder.with_name(f"{folder.name}.whole")
        join_checkpoint(folder, self.folder, whole)
        shutil.rmtree(folder)
        whole.rename(folder)

    def prompt(self, tokenizer: PreTrainedTokenizerBase, text: str, plans: Sequence[VideoPlan]) -> VideoPrompt:
        return assemble(tokenizer, text, plans, self.visual, self.frame)
