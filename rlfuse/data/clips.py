"""Probe and plan the clips and images of rows. An unusable one is a `VideoError`, so that only its row is skipped.

Media given as bytes and frame lists are stored as files next to the runs, named by content hash, readable by all nodes
and removed after `MAX_UNUSED_S` without use.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rlfuse.config.declare import as_typed
from rlfuse.config.video import VideoConfig
from rlfuse.data.media import Media
from rlfuse.data.rows import DataRow
from rlfuse.errors import ConfigError, DataError, VideoError
from rlfuse.samples import Visual
from rlfuse.video.compression import compress_tokens
from rlfuse.video.decode_pool import Clip, DecodePool
from rlfuse.video.frame_list import SUFFIX, frame_list_bytes
from rlfuse.video.images import ImageMetadata, plan_image
from rlfuse.video.plan import (
    SEED_TIMES,
    ClipMetadata,
    FixedSampling,
    Geometry,
    Sampling,
    SeedSampling,
    VideoPlan,
    plan_video,
)
from rlfuse.video.processor_sampling import PixelBounds, ProcessorSampling
from rlfuse.video.towers import Pixels
from rlfuse.video.video_model import VideoModel

MAX_UNUSED_S = 180 * 86400.0
"""Longer than any run: files are touched at startup only, since media with a cached embedding are not read again."""


@dataclass(frozen=True, slots=True)
class MediaStore:
    """Folder of media files named by content hash."""

    folder: Path

    def path_of(self, image: str | bytes, suffix: str = "") -> str:
        """Return the path of an image or clip; bytes are written once. DataError if they can't be written."""
        if isinstance(image, str):
            return image
        path = self.folder / f"{hashlib.sha256(image).hexdigest()[:40]}{suffix}"
        try:
            self._keep(path, image)
        except OSError as error:
            raise DataError(
                f"images: bytes of rows can't be stored in {self.folder} ({error}). Set trainer.default_local_dir to a "
                "writable folder, with several nodes to a shared one."
            ) from error
        return str(path)

    def prune(self) -> None:
        for path in self.folder.glob("*"):
            with suppress(OSError):  # removed by another job, or owned by another user
                status = path.stat()
                if time.time() - max(status.st_mtime, status.st_atime) > MAX_UNUSED_S:
                    path.unlink()

    def _keep(self, path: Path, image: bytes) -> None:
        if path.exists() and path.stat().st_size == len(image):  # a host crash may have truncated it
            with suppress(OSError):  # owned by another user or read-only
                os.utime(path)
            if path.exists():  # another job may have pruned it meanwhile
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}")
        temporary.write_bytes(image)
        temporary.replace(path)  # atomic, since another job may write the same file


T = TypeVar("T")
MANY = 50
KWARGS = "video.mm_processor_kwargs"
BLOCK_BYTES = 16 << 20


def sampling_of(video: VideoConfig, model: VideoModel) -> Sampling:
    """Return the configured sampling; ConfigError or ValueError if the configuration is contradictory."""
    if video.sampling == "family":
        return model.sampling.with_processor_settings(_checked(video.mm_processor_kwargs, model.sampling))
    if video.mm_processor_kwargs:
        raise ConfigError([f"{KWARGS}: has no effect with video.sampling={video.sampling}. Remove it."])
    if video.sampling == "fixed":
        return FixedSampling(video.frames, video.tokens_per_frame)
    return SeedSampling(video.max_tokens, tuple(video.levels), video.fps_general, video.fps_detail, video.fps_motion)


def _checked(given: Mapping[str, Any], sampling: ProcessorSampling) -> Mapping[str, Any]:
    defaults = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    problems = []
    for name, value in given.items():
        if name not in defaults:
            known = ", ".join(sorted(defaults))
            problems.append(f"{KWARGS}.{name}: the processor of model.path has no such setting; valid are {known}.")
            continue
        is_switch, kind = isinstance(defaults[name], bool), int if name.startswith(("min_", "max_")) else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf
        if not (isinstance(value, bool) if is_switch else is_number):
            valid = "true or false" if is_switch else f"a {'whole ' * (kind is int)}number above 0"
            problems.append(f"{KWARGS}.{name}={as_typed(value)}: needs {valid}.")
    if problems:
        raise ConfigError(problems)
    return given


class ClipReader:
    """Plans the media of rows: first `probe_media` of all rows, then `assemble` each row.

    `images`: the folder that stores media given as bytes.
    """

    def __init__(
        self, model: VideoModel, video: VideoConfig, tokenizer: PreTrainedTokenizerBase, workers: int, images: Path
    ):
        self._model, self._video, self._tokenizer = model, video, tokenizer
        self.max_failure_rate = video.max_failure_rate
        self._workers, self._sampling = workers, sampling_of(video, model)
        self._kept = MediaStore(images)
        self._timestamps = SEED_TIMES if video.timestamps == "seed_vl" else model.family.timestamps
        self._clips: dict[str, ClipMetadata | VideoError] = {}
        self._images: dict[str, ImageMetadata | VideoError] = {}
        self._compressed: dict[tuple[str, str], VideoPlan | VideoError] = {}

    def probe_media(self, rows: Sequence[DataRow]) -> None:
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
            if getattr(self._sampling, "use_token_compression", False):
                self._compress(rows, pool)

    def _compress(self, rows: Sequence[DataRow], pool: DecodePool) -> None:
        blocks: dict[tuple[str, str], list[Clip]] = {}
        for media, row in ((clip, each) for each in rows for clip in each.videos):
            with suppress(VideoError):  # raised again by `assemble`
                plan = self._plan(path := self._file(media), self._clips[path], media, row)
                count = max(1, BLOCK_BYTES // (plan.height * plan.width * 3))
                bounds = pairwise([*range(0, plan.frames, count), plan.frames])
                blocks[path, plan.hash] = [Clip(path, plan, first, last) for first, last in bounds]
        new = {key: clips for key, clips in blocks.items() if key not in self._compressed}
        frames, pixels = pool.stream(chain.from_iterable(new.values())), Pixels.of(Path(self._model.folder))
        for key, clips in track(new.items(), "tokens", len(new), disable=len(new) < MANY):
            part = islice(frames, len(clips))
            try:
                self._compressed[key] = compress_tokens(clips[0].plan, map(_usable, part), pixels)
            except VideoError as error:
                self._compressed[key] = error
            deque(part, maxlen=0)  # skip the rest of a clip that can't be decoded

    def assemble(self, row: DataRow, text: str) -> tuple[np.ndarray, list[Visual], list[tuple[int, int]]]:
        """Return token ids, clips and images in order, and their token spans. Raises VideoError."""
        planned = [(path := self._file(each), self._plan(path, self._clips[path], each, row)) for each in row.videos]
        shown = [(path, _usable(self._compressed.get((path, plan.hash), plan))) for path, plan in planned]
        shown += [(path := self._file(each), self._plan(path, self._images[path], each, row)) for each in row.images]
        try:
            prompt = self._model.prompt(self._tokenizer, text, [plan for _, plan in shown])
        except VideoError as error:
            raise error.of(", ".join(path for path, _ in shown)) from None
        found = zip(shown, prompt.positions, strict=True)
        visual = [Visual(places, path=path, plan=plan) for (path, plan), places in found]
        return prompt.token_ids, sorted(visual, key=lambda each: each.positions[0]), sorted(prompt.spans)

    def _file(self, media: Media) -> str:
        if not isinstance(media.source, tuple):
            return self._kept.path_of(media.source)
        frames = [self._kept.path_of(frame) for frame in media.source]
        return self._kept.path_of(frame_list_bytes(frames, media.settings.sample_fps), SUFFIX)

    def _plan(
        self, path: str, facts: ClipMetadata | ImageMetadata | VideoError, media: Media, row: DataRow
    ) -> VideoPlan:
        if isinstance(facts, VideoError):
            raise facts
        try:
            if isinstance(facts, ImageMetadata):
                return plan_image(facts, *self._image_sizes, media.settings, self._video.max_image_tokens)
            task, times, geometry = row.task or self._video.task, self._timestamps, self._model.geometry
            return plan_video(facts, self._sampling, task, geometry, timestamps=times, settings=media.settings)
        except VideoError as error:
            raise error.of(path) from None

    @cached_property
    def _image_sizes(self) -> tuple[PixelBounds, Geometry]:
        return self._model.image_sizes(self._video.max_image_tokens)


def _usable(found: T | VideoError) -> T:
    if isinstance(found, VideoError):
        raise found
    return found
