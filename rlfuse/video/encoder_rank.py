"""Encoder rank: an actor with a vision tower that decodes, encodes and stores parts of clips.

A thread decodes the next block while the current one is encoded: at most two blocks of `block_bytes` exist, plus
`prefetch_bytes` of prefetched frames. Errors of a part are returned, not raised.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import ray
import torch

from rlfuse import clock
from rlfuse.cluster import watchdog
from rlfuse.cluster.child_processes import restore_child_signals
from rlfuse.cluster.garbage import GarbageCollector
from rlfuse.events import Recorder, Span
from rlfuse.samples import FramePlan
from rlfuse.video.embedding import write_rows
from rlfuse.video.models.base import register_custom_family
from rlfuse.video.towers import Tower, TowerShape

FrameReader = Callable[[str, FramePlan, int, int], np.ndarray]
"""(path, plan, first, last) -> frames `first` to `last` of the plan, uint8 [last - first, height, width, 3], within a
time limit."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings of all encoder ranks."""

    model_path: str
    family: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    """Compute dtype of the tower; embeddings are stored as bf16."""
    step: int = 1
    block_bytes: int = 64 << 20
    prefetch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames `first` to `last` (exclusive) of a clip's plan."""

    clip: str
    path: str
    content: str
    """Hash of the file, so that prefetched frames of a file that has changed are not used."""
    plan: FramePlan
    first: int
    last: int

    @property
    def pixels(self) -> tuple[str, str, int, int]:
        """Key of the frames' pixels."""
        return self.content, self.plan.hash, self.first, self.last

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.plan.height * self.plan.width * 3

    def __str__(self) -> str:
        return f"frames {self.first} to {self.last} of {self.clip} ({self.path})"


@dataclass(frozen=True, slots=True)
class Part:
    """Unit of work of a rank: frames, and the file and row that the embeddings are written to."""

    frames: Frames
    target: str
    row: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Result of an encoded part: tokens, number of prefetched frames, seconds of decoding, waiting and encoding."""

    tokens: int
    prefetched: int
    decode_s: float
    wait_s: float
    encode_s: float


@dataclass(frozen=True, slots=True)
class PartFailure:
    """Failure of a part; `message` names clip and frames."""

    message: str


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Decoded frames, and the seconds of decoding."""

    frames: np.ndarray
    seconds: float


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Block that is decoded ahead: prefetched for the next batch, or the next block of this one."""

    future: Future
    prefetched: bool


class EncoderRank:
    """Actor of an encoder rank; called by `encoding` only."""

    def __init__(self, rank: int, settings: EncoderSettings, frames: FrameReader):
        restore_child_signals()  # decoders are children of this process
        self.settings, self.frames = settings, frames
        self.recorder = Recorder(f"encoder/{rank}")
        self.garbage = GarbageCollector(self.recorder)
        self.garbage.freeze()
        watchdog.register(self.recorder.where, self.recorder)
        self._decoder = ThreadPoolExecutor(1, "decoder")
        self._ahead: dict[tuple, _Ahead] = {}
        self._prefetched: deque[Span] = deque()  # recorded by the decoder thread, since `Recorder` is not thread-safe

    def start(self) -> tuple[str, TowerShape, str]:
        """Load the tower; return its version and shape, and this rank's node."""
        settings = self.settings
        register_custom_family(settings.family)
        if settings.device == "cpu":
            torch.set_num_threads(1)  # ranks share the host's cores, and equal thread counts give bit-equal results
        self.tower = Tower(settings.model_path, settings.device, settings.dtype, settings.step)
        return self.tower.version, self.tower.shape, ray.get_runtime_context().get_node_id()

    def update(self, weights: str, updates: int) -> str:
        self.tower.update(Path(weights), updates)
        return self.tower.version

    def prefetch(self, upcoming: Sequence[Frames]) -> None:
        """Start decoding frames of the next batch, up to `prefetch_bytes`; earlier prefetched frames are dropped."""
        self._call_off()
        self._ahead.clear()
        room = self.settings.prefetch_bytes
        for block in chain.from_iterable(self._blocks(frames) for frames in upcoming):
            if (room := room - block.bytes) < 0:
                return
            self._ahead[block.pixels] = _Ahead(self._decoder.submit(self._decode, block, prefetched=True), True)

    def encode(self, part: Part, upcoming: Frames | None = None) -> Encoded | PartFailure:
        """Decode, encode and store a part, and start decoding `upcoming` meanwhile."""
        self._call_off()
        with self.recorder.span("encode", samples=(part.frames.clip,), cause="missing embedding") as span:
            try:
                done = self._encode(part, upcoming)
            except Exception as error:
                span.attributes["error"] = repr(error)
                return PartFailure(f"{part.frames}: {type(error).__name__}: {error}")
            span.tokens = done.tokens
            span.attributes |= {"decode_s": done.decode_s, "wait_s": done.wait_s}
            return done

    def drain(self, collect: bool = False) -> list[Span]:
        """Return spans since the last call. `collect`: run the garbage collector first."""
        if collect:
            self.garbage.collect()
        while self._prefetched:
            self.recorder.add(self._prefetched.popleft())
        return self.recorder.drain()

    def _encode(self, part: Part, upcoming: Frames | None) -> Encoded:
        row, prefetched, decode_s, wait_s, encode_s = part.row, 0, 0.0, 0.0, 0.0
        next_up = self._blocks(upcoming)[:1] if upcoming else [None]
        for block, after in pairwise(chain(self._blocks(part.frames), next_up)):
            began = time.perf_counter()
            found, early = self._decoded(block)
            prefetched += early * len(found.frames)
            decode_s, wait_s = decode_s + found.seconds, wait_s + time.perf_counter() - began
            is_free = all(each.future.done() for each in self._ahead.values())
            if after and after.pixels not in self._ahead and is_free:  # the decoder is free
                self._ahead[after.pixels] = _Ahead(self._decoder.submit(self._decode, after), False)
            began = time.perf_counter()
            rows = self.tower.rows(torch.from_numpy(found.frames), block.plan, block.first)
            write_rows(part.target, row, rows)
            encode_s += time.perf_counter() - began
            row += len(rows)
        return Encoded(row - part.row, prefetched, decode_s, wait_s, encode_s)

    def _blocks(self, whole: Frames) -> list[Frames]:
        bounds = self.tower.shape.blocks(whole.plan, whole.first, whole.last, self.settings.block_bytes)
        return [replace(whole, first=first, last=last) for first, last in bounds]

    def _call_off(self) -> None:
        self._ahead = {pixels: each for pixels, each in self._ahead.items() if not each.future.cancel()}

    def _decoded(self, block: Frames) -> tuple[_Decoded, bool]:
        ahead = self._ahead.pop(block.pixels, None)
        if ahead and ahead.future.exception() is None:
            future, prefetched = ahead.future, ahead.prefetched
        else:  # drop blocks decoded ahead that were skipped
            wait(each.future for each in self._ahead.values())  # their time does not count for this block
            self._ahead = {pixels: each for pixels, each in self._ahead.items() if each.prefetched}
            future, prefetched = self._decoder.submit(self._decode, block), False
        found = future.result()
        frames = found.frames
        expected = (block.last - block.first, block.plan.height, block.plan.width, 3)
        if frames.shape != expected or frames.dtype != np.uint8:
            raise ValueError(
                f"decoding {block} returned {frames.dtype} {list(frames.shape)} instead of uint8 {list(expected)}"
            )
        return found, prefetched

    def _decode(self, block: Frames, prefetched: bool = False) -> _Decoded:
        span = Span("prefetch", self.recorder.where, clock.now(), samples=(block.clip,), cause="next step")
        began = time.perf_counter()
        frames = self.frames(block.path, block.plan, block.first, block.last)
        if prefetched:
            span.end, span.attributes["bytes"] = clock.now(), block.bytes
            self._prefetched.append(span)
        return _Decoded(frames, time.perf_counter() - began)
