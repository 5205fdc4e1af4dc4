"""The keys of the group `video`: clips and images. A part of the schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class VideoConfig:
    """Clips of rows that have some: which frames a model sees of them, and their encoding, once for all who need it."""

    sampling: str = "family"
    """Which frames a model sees:"""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """family: settings of the model's own video processor in place of its configuration's: fps, min_frames, max_frames,
    min_pixels, max_pixels; Qwen: cap_pixels_per_frame (true: bound the pixels of a clip as qwen-vl-utils and verl do;
    transformers' default is false), max_video_tokens; VideoLLaMA3: use_token_compression (leave out tokens that repeat
    those of the frame before, for which clips are decoded at startup; transformers' default is true). vLLM's name."""
    timestamps: str = "family"
    """How a prompt says when a frame is shown:"""
    max_tokens: int = 81920
    """seed_vl: visual tokens of a clip at most."""
    levels: list[int] = field(default_factory=lambda: [640, 512, 384, 256, 160, 128])
    """seed_vl: tokens per frame to choose from, largest first."""
    fps_general: float = 1.0
    """seed_vl: frames per second for the task `general`."""
    fps_detail: float = 2.0
    """seed_vl: for the task `detail`, fine temporal detail."""
    fps_motion: float = 5.0
    """seed_vl: for the task `motion`, counting and motion."""
    task: str = "general"
    """Task of rows whose extra_info.task does not say:"""
    frames: int = 128
    """fixed: frames of a clip, spread evenly; fewer where it has fewer."""
    tokens_per_frame: int = 256
    """fixed: tokens of a frame at most."""
    max_image_tokens: int | None = None
    """Visual tokens of an image at most; null: as many as the model's own processor allows."""
    encoder_ranks: int | None = None
    """Processes with a vision tower, which share the frames of a step; null: one per slot."""
    cache_mb: int = 4096
    """Embeddings kept in the shared memory of a node, in MiB; a step's own have to fit."""
    disk_cache: str | None = None
    """Folder where embeddings are kept from run to run (they never change while the tower is frozen)."""
    decode_workers: int = 1
    """Decoding processes of each encoder rank."""
    prefetch_mb: int = 512
    """Frames of what comes next, a step or a validation, that each encoder rank decodes meanwhile, in MiB; 0: none."""
    encode_ahead: bool = False
    """Clips of what comes next, a step or a validation, are encoded meanwhile, not only decoded: by as few encoder
    ranks as keep up, going by measured rates, and within video.cache_mb."""
    decode_timeout_s: float = 60.0
    """Longest time to read a clip, or the part that a rank encodes."""
    max_failure_rate: float = 0.1
    """Rows of clips or images that can't be used are left out; above this share, also of a step's, the run stops."""
    log_clips: int | None = None
    """Clips of a step's logged samples whose frames are drawn, with question, answers, rewards; null: all, 0: none."""
    freeze_tower: bool = True
    """False: the actor's updates train the vision tower too, on clips encoded again with gradient."""
