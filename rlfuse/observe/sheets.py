"""Contact sheets of logged samples: what the model saw of a clip, beside question, answer and reward.

Role: the journal asks for them at the end of a step; PNG files in the run folder, and their paths for wandb.
Waits for decoders, each clip at most `video.decode_timeout_s`; a clip that can't be decoded again has no sheet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rlfuse.samples import Sample
from rlfuse.video.contact_sheet import Caption, contact_sheet
from rlfuse.video.decode_pool import Clip, DecodePool
from rlfuse.video.errors import VideoError


class ContactSheets:
    """At most `most` a step (None: as many as there are), in `folder/contact_sheets/`."""

    def __init__(self, folder: Path, most: int | None, decode_timeout_s: float):
        self._folder, self._most = folder / "contact_sheets", most
        self._pool = DecodePool(timeout_s=decode_timeout_s)

    async def draw(self, step: int, samples: Sequence[Sample]) -> dict[str, Path]:
        """Sample id -> picture, for the first of these samples that were shown a clip."""
        shown = [sample for sample in samples if sample.prompt.video is not None and sample.response is not None]
        chosen = shown[: self._most]
        return await asyncio.to_thread(self._draw, step, chosen) if chosen else {}

    def _draw(self, step: int, samples: Sequence[Sample]) -> dict[str, Path]:
        self._folder.mkdir(exist_ok=True)
        families = [list(family) for _, family in groupby(samples, lambda sample: sample.prompt.index)]
        videos = [family[0].prompt.video for family in families]
        drawn = {}
        frames_of = self._pool.stream(Clip(video.path, video.plan) for video in videos)
        for family, frames in zip(families, frames_of, strict=True):
            for sample in () if isinstance(frames, VideoError) else family:
                drawn[sample.id] = self._folder / f"{sample.id.replace('/', '-')}.png"
                contact_sheet(frames, sample.prompt.video.plan, _caption(step, sample)).save(drawn[sample.id])
        return drawn

    def close(self) -> None:
        """End the decoder."""
        self._pool.close()


def _caption(step: int, sample: Sample) -> Caption:
    prompt, truth = sample.prompt, sample.prompt.ground_truth
    told = "" if truth is None else str(truth)
    return Caption(f"step {step} · {sample.id}", prompt.text, sample.response.text, told, sample.reward)
