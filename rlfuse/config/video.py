"""Keys of the group `video`: frame sampling, decoding and encoding of clips and images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlfuse.config.declare import FRAMES, LOGGING, RESOURCES, TOLERANCE, TRAINED, KeyGroup, key


@dataclass
class VideoConfig(KeyGroup):
    """Clips and images: frame sampling, resolution, decoding and encoding."""

    sampling: str = key(
        "family",
        FRAMES,
        choices="family (as the model's processor) | seed_vl (Seed1.5-VL: frames per second by task, the largest of "
        "`levels` that fits) | fixed (the same number and size for every clip)",
    )
    """Frame sampling: number and size of the frames of a clip."""
    mm_processor_kwargs: dict[str, Any] = key({}, FRAMES)
    """sampling=family: overrides of the model's video processor. All families: fps, min_frames, max_frames, min_pixels,
    max_pixels. Qwen: max_video_tokens, and cap_pixels_per_frame (true: limit the pixels as qwen-vl-utils and verl;
    transformers' default is false). VideoLLaMA3: use_token_compression (drop tokens that repeat those of the previous
    frame; clips are then decoded at startup; transformers' default is true)."""
    timestamps: str = key(
        "family",
        FRAMES,
        choices="family (as the model's processor: VideoLLaMA3 `Time 1.5s:`, Qwen3-VL `<1.5 seconds>`, "
        "Qwen2.5-VL none) | seed_vl (`[1.5 second]`)",
    )
    """Format of frame timestamps in the prompt."""
    max_tokens: int = key(81920, FRAMES, unit="tokens", at_least=1)
    """sampling=seed_vl: maximum visual tokens per clip."""
    levels: list[int] = key([640, 512, 384, 256, 160, 128], FRAMES)
    """sampling=seed_vl: allowed numbers of tokens per frame, in descending order."""
    fps_general: float = key(1.0, FRAMES, above=0)
    """sampling=seed_vl: frames per second for the task `general`."""
    fps_detail: float = key(2.0, FRAMES, above=0)
    """sampling=seed_vl: frames per second for the task `detail` (fine temporal detail)."""
    fps_motion: float = key(5.0, FRAMES, above=0)
    """sampling=seed_vl: frames per second for the task `motion` (counting and motion)."""
    task: str = key("general", FRAMES, choices="general | detail | motion")
    """sampling=seed_vl: task of rows without extra_info.task."""
    frames: int = key(128, FRAMES, at_least=1)
    """sampling=fixed: number of evenly spaced frames per clip; fewer if the clip has fewer frames."""
    tokens_per_frame: int = key(256, FRAMES, unit="tokens", at_least=1)
    """sampling=fixed: maximum tokens per frame."""
    max_image_tokens: int | None = key(None, FRAMES, unit="tokens", at_least=1)
    """Maximum visual tokens per image; null: the limit of the model's processor."""
    encoder_ranks: int | None = key(None, RESOURCES, at_least=1)
    """Number of encoder processes, each with a vision tower, that share the frames of a step; null: one per slot."""
    cache_mb: int = key(4096, RESOURCES, unit="MiB", at_least=1)
    """Size of the embedding cache in the shared memory of each node; the embeddings of one step must fit."""
    disk_cache: str | None = key(None, RESOURCES, is_path=True)
    """Folder of a persistent embedding cache shared between runs (frozen vision tower only); null: none."""
    decode_workers: int = key(1, RESOURCES, at_least=1)
    """Number of decoding processes per encoder rank."""
    prefetch_mb: int = key(512, RESOURCES, unit="MiB", at_least=0)
    """Memory per encoder rank for prefetching decoded frames of the next step or validation; 0: no prefetching."""
    encode_ahead: bool = key(False, RESOURCES)
    """Also encode the clips of the next step or validation in advance, within video.cache_mb and on as few encoder
    ranks as measured rates require."""
    decode_timeout_s: float = key(60.0, RESOURCES, unit="s", above=0)
    """Timeout for decoding a clip, or the part of it that one rank encodes."""
    max_failure_rate: float = key(0.1, TOLERANCE, at_least=0, at_most=1)
    """Maximum fraction of rows with unreadable clips or images, which are skipped; above it, in the data or in a step,
    the run stops."""
    log_clips: int | None = key(None, LOGGING, at_least=0)
    """Number of clips per step logged as images, with question, responses and rewards; null: all clips of the logged
    samples, 0: none."""
    freeze_vision_tower: bool = key(True, TRAINED)
    """Keep the vision tower frozen; false: train it with the actor (clips are encoded again with gradients)."""
