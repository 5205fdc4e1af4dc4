"""Clips and images of rows: each is looked at once, planned, and written into its prompt as placeholders.

Role: used by `prompts.load_prompts` for a video model. What it can't use is a `VideoError`, so that only that row is
left out. Waits for decoding processes, each file at most `video.decode_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rlfuse.config.video import VideoConfig
from rlfuse.data.kept_images import KeptImages
from rlfuse.data.media import Media
from rlfuse.data.rows import DataRow
from rlfuse.errors import VideoError
from rlfuse.samples import Visual
from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.frame_list import SUFFIX, packed
from rlfuse.video.images import ImageFacts, plan_image
from rlfuse.video.plan import (
    ClipFacts,
    FixedSampling,
    Geometry,
    Sampling,
    SeedSampling,
    VideoPlan,
    plan_video,
)
from rlfuse.video.processor_sampling import PixelBounds
from rlfuse.video.timestamps import SEED_TIMES
from rlfuse.video.video_model import VideoModel

MANY = 50
"""Files from which on looking at them shows its progress."""


def sampling_of(video: VideoConfig, model: VideoModel) -> Sampling:
    """What the configuration says of frames and tokens; ValueError where it contradicts itself."""
    if video.sampling == "family":
        return model.sampling
    if video.sampling == "fixed":
        return FixedSampling(video.frames, video.tokens_per_frame)
    return SeedSampling(video.max_tokens, tuple(video.levels), video.fps_general, video.fps_detail, video.fps_motion)


class ClipReader:
    """`look_at` rows, then `assemble` each. `images`: the folder for images that rows bring as bytes."""

    def __init__(
        self,
        model: VideoModel,
        video: VideoConfig,
        tokenizer: PreTrainedTokenizerBase,
        workers: int,
        images: Path,
    ):
        self._model, self._video, self._tokenizer = model, video, tokenizer
        self.max_failure_rate = video.max_failure_rate
        self._workers, self._sampling = workers, sampling_of(video, model)
        self._kept = KeptImages(images)
        self._timestamps = SEED_TIMES if video.timestamps == "seed_vl" else model.family.timestamps
        self._clips: dict[str, ClipFacts | VideoError] = {}
        self._images: dict[str, ImageFacts | VideoError] = {}

    def look_at(self, rows: Sequence[DataRow]) -> None:
        """Read the headers of the rows' clips and their images, several at a time."""
        clips = list(dict.fromkeys(self._file(each) for row in rows for each in row.videos))
        images = list(dict.fromkeys(self._file(each) for row in rows for each in row.images))
        self._kept.prune()
        with DecodePool(self._workers, self._video.decode_timeout_s, max_clips=2 * self._workers) as pool:
            clips = [path for path in clips if path not in self._clips]
            facts = track(pool.probe(clips), "clips", len(clips), disable=len(clips) < MANY)
            self._clips |= dict(zip(clips, facts, strict=True))
            images = [path for path in images if path not in self._images]
            seen = track(pool.probe_images(images), "images", len(images), disable=len(images) < MANY)
            self._images |= dict(zip(images, seen, strict=True))

    def assemble(self, row: DataRow, text: str) -> tuple[np.ndarray, list[Visual], list[tuple[int, int]]]:
        """Return the token ids of the templated prompt, its clips and images in order, and the first and last
        (exclusive) token that belongs to each. Raises VideoError."""
        shown = [(path := self._file(each), self._plan(path, self._clips[path], each, row)) for each in row.videos]
        shown += [(path := self._file(each), self._plan(path, self._images[path], each, row)) for each in row.images]
        try:
            prompt = self._model.prompt(self._tokenizer, text, [plan for _, plan in shown])
        except VideoError as error:
            raise error.of(", ".join(path for path, _ in shown)) from None
        found = zip(shown, prompt.positions, strict=True)
        visual = [Visual(places, path=path, plan=plan) for (path, plan), places in found]
        return prompt.token_ids, sorted(visual, key=lambda each: each.positions[0]), sorted(prompt.spans)

    def _file(self, media: Media) -> str:
        """Return the path of a clip or image, which is written where the row brings its bytes or a list of frames."""
        if not isinstance(media.source, tuple):
            return self._kept.file_of(media.source)
        frames = [self._kept.file_of(frame) for frame in media.source]
        return self._kept.file_of(packed(frames, media.settings.sample_fps), SUFFIX)

    def _plan(self, path: str, facts: ClipFacts | ImageFacts | VideoError, media: Media, row: DataRow) -> VideoPlan:
        if isinstance(facts, VideoError):
            raise facts
        try:
            if isinstance(facts, ImageFacts):
                return plan_image(facts, *self._image_sizes, media.settings, self._video.max_image_tokens)
            task, times, geometry = row.task or self._video.task, self._timestamps, self._model.geometry
            return plan_video(facts, self._sampling, task, geometry, timestamps=times, settings=media.settings)
        except VideoError as error:
            raise error.of(path) from None

    @cached_property
    def _image_sizes(self) -> tuple[PixelBounds, Geometry]:
        return self._model.image_sizes(self._video.max_image_tokens)

