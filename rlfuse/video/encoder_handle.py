"""Driver-side handle of one encoder rank, which restarts it when it is lost.

Calls have a timeout. A lost process is replaced before its failure is returned. A part is retried once, unless it was
the only work of the process when it died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from rlfuse.cluster import remote, watchdog
from rlfuse.cluster.nodes import from_head
from rlfuse.errors import EngineError, WorkerLost
from rlfuse.events import Recorder, Span
from rlfuse.video.encoder_rank import Encoded, EncoderRank, EncoderSettings, FrameReader, Frames, Part, PartFailure


@dataclass(frozen=True, slots=True)
class EncoderPlacement:
    """Placement of a rank: Ray options of its actor, and a name of the memory that it shares with other ranks."""

    options: dict[str, Any]
    memory: str = ""


class EncoderHandle:
    """Handle of the encoder rank `rank`."""

    def __init__(
        self, rank: int, placement: EncoderPlacement, settings: EncoderSettings, frames: FrameReader, timeout_s: float
    ):
        self.name, self.rank, self.placement = f"encoder/{rank}", rank, placement
        self.settings, self.frames, self.timeout_s = settings, frames, timeout_s
        self._recorder = Recorder(self.name)
        self._actor: Any = None
        self._updated: tuple[str, int] | None = None
        self._prefetching = False

    @property
    def memory(self) -> str:
        return self.placement.memory or self.node

    async def start(self) -> None:
        """Start the process and load the tower with the weights of the last update. Raises EngineError."""
        actor = ray.remote(EncoderRank).options(**self.placement.options)
        create = partial(actor.remote, self.rank, self.settings, self.frames)
        self._actor = await from_head(create)
        self._prefetching = False
        self.version, self.shape, self.node = await self._ask("load its tower", "start")
        if self._updated:
            await self.update(*self._updated)

    async def update(self, weights: str, updates: int) -> None:
        self._updated = (weights, updates)
        self.version = await self._ask(f"load {weights}", "update", weights, updates)

    async def prefetch(self, upcoming: Sequence[Frames]) -> None:
        try:
            await self._ask("prefetch frames", "prefetch", upcoming)
            self._prefetching = True
        except EngineError as error:
            await self._replace(error)

    async def encode(self, part: Part, upcoming: Frames | None) -> Encoded | PartFailure:
        try:
            return await self._ask(f"encode {part.frames}", "encode", part, upcoming)
        except EngineError as error:
            alone = not (upcoming or self._prefetching)
            await self._replace(error)
            if not alone and remote.is_death(error):
                return await self.encode(part, None)
            return PartFailure(str(error))

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return spans since the last call, including restarts. `collect`: run the garbage collector first."""
        try:
            spans = await self._ask("hand over its spans", "drain", collect)
        except WorkerLost as error:
            await self._replace(error)
            spans = []
        return [*spans, *self._recorder.drain()]

    async def _replace(self, error: EngineError) -> None:
        watchdog.say(f"lost: {error}\n{self.name}: restarting it")
        with self._recorder.span("restart", cause=str(error)):
            self.close()
            await self.start()

    def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)

    async def _ask(self, action: str, method: str, *arguments: Any) -> Any:
        return await remote.call(getattr(self._actor, method).remote(*arguments), self.name, action, self.timeout_s)
