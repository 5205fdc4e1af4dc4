"""Clips of rows: each is looked at once, planned, and written into its prompt as placeholders.

Role: used by `prompts.load_prompts` for a video model. What it can't use is a `VideoError`, so that only that row is
left out. Waits for decoding processes, each file at most `video.decode_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rlfuse.config.schema import VideoConfig
from rlfuse.data.rows import DataRow
from rlfuse.errors import DataError, VideoError
from rlfuse.samples import Video
from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.plan import (
    SEED_TIMES,
    ClipFacts,
    FixedSampling,
    Sampling,
    SeedSampling,
    TaskKind,
    VideoPlan,
    plan_video,
)
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
    """`look_at` rows, then `assemble` each; `max_tokens`: of a whole prompt."""

    def __init__(
        self,
        model: VideoModel,
        video: VideoConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        workers: int,
    ):
        self._model, self._video, self._tokenizer, self._max_tokens = model, video, tokenizer, max_tokens
        self._workers, self._sampling = workers, sampling_of(video, model)
        self._timestamps = SEED_TIMES if video.timestamps == "seed_vl" else model.family.timestamps
        self._facts: dict[str, ClipFacts | VideoError] = {}

    def look_at(self, rows: Sequence[DataRow]) -> None:
        """Read the headers of the rows' files, several at a time."""
        paths = list(dict.fromkeys(path for row in rows for path in row.videos if path not in self._facts))
        with DecodePool(self._workers, self._video.decode_timeout_s, max_clips=2 * self._workers) as pool:
            facts = track(pool.probe(paths), "clips", len(paths), disable=len(paths) < MANY)
            self._facts |= dict(zip(paths, facts, strict=True))

    def assemble(self, row: DataRow, text: str) -> tuple[np.ndarray, Video | None]:
        """Token ids of the templated prompt, and its clip with the places among them; or VideoError."""
        if len(row.videos) > 1:
            raise VideoError(f"has {len(row.videos)} clips", "A prompt can show one; join them into one file")
        path = row.videos[0] if row.videos else None
        try:
            plan = self._plan(row, path) if path else None
            prompt = self._model.prompt(self._tokenizer, text, plan, self._max_tokens)
        except VideoError as error:
            raise error.of(path) if path else error from None
        return prompt.token_ids, Video(path, plan, prompt.positions[0]) if plan else None

    def _plan(self, row: DataRow, path: str) -> VideoPlan:
        facts = self._facts[path]
        if isinstance(facts, VideoError):
            raise facts
        task, geometry = self._task(row), self._model.geometry
        return plan_video(facts, self._sampling, task, geometry, timestamps=self._timestamps)

    def check_failures(self, unusable: Sequence[str], of: int) -> None:
        """DataError if more rows have clips that can't be used than are allowed."""
        if len(unusable) > self._video.max_failure_rate * of:
            raise DataError(
                f"{len(unusable)} of {of} rows have clips that can't be used, more than video.max_failure_rate="
                f"{self._video.max_failure_rate}. The first is {unusable[0]}"
            )

    def _task(self, row: DataRow) -> TaskKind:
        asked = (row.columns.get("extra_info") or {}).get("task")
        return TaskKind(asked) if asked in list(TaskKind) else TaskKind(self._video.task)
