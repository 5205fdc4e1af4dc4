"""Contact sheets of logged samples: what the model saw of a clip, beside question, answer and reward.

Role: the journal asks for them at the end of a step; PNG files in the run folder, and their paths for wandb.
Waits for decoders, each clip at most `video.decode_timeout_s`; a clip that can't be decoded again has no sheet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rlfuse.samples import Sample
from rlfuse.video.contact_sheet import Caption, contact_sheet
from rlfuse.video.decode_pool import Clip, DecodePool
from rlfuse.video.errors import VideoError


class ContactSheets:
    """At most `most` a step, in `folder/contact_sheets/`."""

    def __init__(self, folder: Path, most: int, decode_timeout_s: float):
        self._folder, self._most = folder / "contact_sheets", most
        self._pool = DecodePool(timeout_s=decode_timeout_s)

    async def draw(self, step: int, samples: Sequence[Sample]) -> dict[str, Path]:
        """Sample id -> picture, for the first samples that were shown a clip, each of another clip if there are."""
        shown: dict[str, Sample] = {}
        for sample in samples:
            if sample.prompt.video is not None and sample.response is not None:
                shown.setdefault(sample.prompt.video.path, sample)
        chosen = list(shown.values())[: self._most]
        return await asyncio.to_thread(self._draw, step, chosen) if chosen else {}

    def _draw(self, step: int, samples: Sequence[Sample]) -> dict[str, Path]:
        self._folder.mkdir(exist_ok=True)
        clips = (Clip(s.prompt.video.path, s.prompt.video.plan, sample=s.id) for s in samples)
        drawn = {}
        for sample, frames in zip(samples, self._pool.stream(clips), strict=True):
            if isinstance(frames, VideoError):
                continue
            prompt, truth = sample.prompt, sample.prompt.ground_truth
            caption = Caption(
                f"step {step} · {sample.id}",
                prompt.text,
                sample.response.text,
                "" if truth is None else str(truth),
                sample.reward,
            )
            drawn[sample.id] = self._folder / f"{sample.id.replace('/', '-')}.png"
            contact_sheet(frames, prompt.video.plan, caption).save(drawn[sample.id])
        return drawn

    def close(self) -> None:
        """End the decoder."""
        self._pool.close()
