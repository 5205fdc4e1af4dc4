"""Encode the clips of a step before generation and hold them until its last pass (the `Clips` protocol).

A group whose clip cannot be encoded is dropped and counted. Clips of the next batch are prefetched or encoded ahead
with lower priority.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from rlfuse.errors import EngineError
from rlfuse.events import Span
from rlfuse.samples import Group, Prompt, Visual
from rlfuse.video.encoding import Clip, ClipFailure, SequenceParallelEncoder

AHEAD = "the next batch"


class StepClips:
    """Clips of a step. `max_failure_rate`: tolerated fraction of a step's prompts; `ahead`: encode the next batch."""

    def __init__(
        self, encoder: SequenceParallelEncoder, max_failure_rate: float, say: Callable[[str], None], ahead: bool = False
    ):
        self.encoder, self.max_failure_rate, self.say, self.ahead = encoder, max_failure_rate, say, ahead
        self._shapes: list[tuple[int, int, int]] = []
        self._dropped = 0
        self._coming: asyncio.Task[None] | None = None
        self._began, self._holder = 0.0, ""  # of the pending task
        self._lasted: dict[str, float] = {}  # phase -> seconds available to the last task

    async def start(self) -> None:
        await self.encoder.start()

    async def encode(self, groups: Sequence[Group], holder: str, check_failures: bool = True) -> list[Group]:
        """Encode the groups' clips, held for `holder`; return the groups without failures. Raises EngineError."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self._lasted[self._holder] = time.monotonic() - self._began
            await coming
            await self.encoder.release(AHEAD)
        shown = {group.prompt.index: group.prompt.visual for group in groups if group.prompt.visual}
        if not shown:
            return list(groups)
        clips = [_clip(index, each) for index, visual in shown.items() for each in visual]
        found = iter(await self.encoder.encode(clips, holder))
        outcomes = {index: [next(found) for _ in visual] for index, visual in shown.items()}
        self._shapes += [(clip.plan.frames, clip.plan.tokens, clip.plan.level) for clip in clips]
        failed = {index: each for index, of in outcomes.items() for each in of if isinstance(each, ClipFailure)}
        kept = [group for group in groups if group.prompt.index not in failed]
        if check_failures:
            self._check_failures(failed, len(shown), none_left=holder == "training" and not kept)
        self._dropped += len(groups) - len(kept)
        for group in kept:
            if visual := group.prompt.visual:
                pairs = zip(visual, outcomes[group.prompt.index], strict=True)
                group.prompt = replace(group.prompt, visual=tuple(replace(each, source=of) for each, of in pairs))
                for sample in group.generated:
                    sample.prompt = group.prompt
        return kept

    def prefetch(self, prompts: Sequence[Prompt], holder: str) -> None:
        """Start with the clips of the next prompts, unless busy; the next `encode` raises its errors."""
        clips = [_clip(each.index, seen) for each in prompts for seen in each.visual]
        if clips and self._coming is None:
            lasts = self._lasted.get(holder, 0.0)
            work = self._encode_ahead(clips, lasts) if self.ahead else self.encoder.prefetch(clips)
            self._began, self._holder, self._coming = time.monotonic(), holder, asyncio.create_task(work)

    async def _encode_ahead(self, clips: Sequence[Clip], within_s: float) -> None:
        with suppress(EngineError):
            await self.encoder.encode_ahead(clips, AHEAD, within_s, lambda: self._coming is None)

    def _check_failures(self, failed: dict[int, ClipFailure], of: int, none_left: bool) -> None:
        if not failed:
            return
        first = next(iter(failed.values())).message
        unusable = f"{len(failed)} of {of} prompts have clips or images that can't be used"
        text = f"{unusable} and are skipped; the first: {first}"
        self.say(text)
        if none_left:
            raise EngineError(f"{text}\nNo prompt of the step is left; the run stops. Correct the files.")
        if len(failed) > self.max_failure_rate * of:
            raise EngineError(
                f"{text}\nThis exceeds video.max_failure_rate={self.max_failure_rate}; the run stops. Repair the "
                "files, or raise the rate if these prompts may be skipped."
            )

    async def release(self, holder: str) -> dict[str, float]:
        """Release the clips held for `holder`; return the metrics `video/*` since the last call."""
        await self.encoder.release(holder)
        seen, self._shapes, dropped, self._dropped = self._shapes, [], self._dropped, 0
        names = ("video/frames", "video/tokens", "video/level")
        means = {name: sum(of) / len(of) for name, of in zip(names, zip(*seen, strict=True), strict=False)}
        return means | {"video/dropped_groups": float(dropped)} | await self.encoder.metrics()

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return spans of the encoder ranks since the last call. `collect`: run their garbage collectors first."""
        return await self.encoder.drain(collect)

    async def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self.encoder.close()


def _clip(prompt: int, seen: Visual) -> Clip:
    return Clip(f"{'image' if seen.plan.is_image else 'clip'} of prompt {prompt}", seen.path, seen.plan)
