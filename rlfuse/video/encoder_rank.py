"""One encoder rank: a process with a tower that decodes, encodes and stores the frames it is told to.

Role: Ray makes an actor of it; `encoding` sends it one part of a clip at a time. Pixels and embeddings never leave it
but into the node's cache.
Memory: at most two blocks of decoded frames exist, of `block_bytes` each (or `cut` frames, where those are more).
Concurrency: one thread decodes the next block, of this part or of the one that comes next, while this one is encoded.
Waits for that thread, at most `decode_timeout_s` a block. Whatever goes wrong with a part is answered, not raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import ray
import torch

from rlfuse.cluster import watchdog
from rlfuse.cluster.child_processes import restore_child_signals
from rlfuse.cluster.garbage import GarbageCollector
from rlfuse.events import Recorder, Span
from rlfuse.samples import FramePlan
from rlfuse.video.embedding import write_rows
from rlfuse.video.models.base import bring_along
from rlfuse.video.towers import Tower, TowerShape

FrameReader = Callable[[str, FramePlan, int, int], np.ndarray]
"""(path, plan, first, last) -> uint8 [last - first, height, width, 3]: these of the plan's frames."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What all ranks have in common."""

    model_path: str
    family: str | None = None
    """A user's own, `model.video_family`."""
    device: str = "cpu"
    dtype: str = "float32"
    """The tower computes in it; embeddings are stored as bf16 in any case."""
    step: int = 1
    """Temporal patches that run at a time, see `TowerShape.step`."""
    block_bytes: int = 64 << 20
    """Pixels decoded at a time."""
    decode_timeout_s: float = 300.0
    """For one block: a backstop for decoders that don't bound themselves (`DecodePool` does)."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames `first` to `last` (exclusive) of what the plan shows of a clip."""

    clip: str
    path: str
    plan: FramePlan
    first: int
    last: int

    def __str__(self) -> str:
        return f"frames {self.first} to {self.last} of clip {self.clip} ({self.path})"


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank encodes at a time, and where it goes."""

    frames: Frames
    target: str
    """File of the cache entry."""
    row: int
    """Of the file, where the first frame's tokens go."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part is in the cache. Seconds: decoding, of which waited for, and encoding."""

    tokens: int
    decode_s: float
    wait_s: float
    encode_s: float


@dataclass(frozen=True, slots=True)
class PartFailure:
    """A part could not be encoded; `message` names clip and frames."""

    message: str


class EncoderRank:
    """See the module; every method is called by `encoding` only."""

    def __init__(self, rank: int, settings: EncoderSettings, frames: FrameReader):
        restore_child_signals()  # decoders are children of this process
        self.settings, self.frames = settings, frames
        self.recorder = Recorder(f"encoder/{rank}")
        self.garbage = GarbageCollector(self.recorder)
        watchdog.register(self.recorder.where, self.recorder)
        self._decoder = ThreadPoolExecutor(1, "decoder")
        self._ahead: tuple[Frames, Future] | None = None

    def start(self) -> tuple[str, TowerShape, str]:
        """Load the tower; its version and shape, and the node this rank is on."""
        settings = self.settings
        bring_along(settings.family)
        if settings.device == "cpu":
            torch.set_num_threads(1)  # ranks share a host's cores; equal thread counts also give equal bits
        self.tower = Tower(settings.model_path, settings.device, settings.dtype, settings.step)
        return self.tower.version, self.tower.shape, ray.get_runtime_context().get_node_id()

    def update(self, weights: str, updates: int) -> str:
        """Newer weights of a tower that is trained; returns the new version."""
        self.tower.update(Path(weights), updates)
        return self.tower.version

    def encode(self, part: Part, upcoming: Frames | None = None) -> Encoded | PartFailure:
        """Decode, encode and store a part; begin to decode what comes next meanwhile."""
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
        """Spans since the last call. `collect`: garbage, before."""
        if collect:
            self.garbage.collect()
        return self.recorder.drain()

    def _encode(self, part: Part, upcoming: Frames | None) -> Encoded:
        row, decode_s, wait_s, encode_s = part.row, 0.0, 0.0, 0.0
        next_up = self._blocks(upcoming)[:1] if upcoming else [None]
        for block, after in pairwise(chain(self._blocks(part.frames), next_up)):
            began = time.perf_counter()
            frames, seconds = self._decoded(block)
            decode_s, wait_s = decode_s + seconds, wait_s + time.perf_counter() - began
            if after:
                self._ahead = (after, self._decoder.submit(self._decode, after))
            began = time.perf_counter()
            rows = self.tower.encode(torch.from_numpy(frames))
            write_rows(part.target, row, rows)
            encode_s += time.perf_counter() - began
            row += len(rows)
        return Encoded(row - part.row, decode_s, wait_s, encode_s)

    def _blocks(self, whole: Frames) -> list[Frames]:
        """What is decoded at a time; the tower may be cut there."""
        cut, frame_bytes = self.tower.shape.cut, whole.plan.height * whole.plan.width * 3
        count = max(cut, self.settings.block_bytes // frame_bytes // cut * cut)
        bounds = [*range(whole.first, whole.last, count), whole.last]
        return [replace(whole, first=first, last=last) for first, last in pairwise(bounds)]

    def _decoded(self, block: Frames) -> tuple[np.ndarray, float]:
        """The block's frames and the seconds that decoding took, begun ahead or now."""
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[0] != block:  # what was to come next was skipped
            self._settled(ahead[1])
            ahead = None
        future = ahead[1] if ahead else self._decoder.submit(self._decode, block)
        if not self._settled(future):
            raise TimeoutError(f"decoding {block} took longer than {self.settings.decode_timeout_s:g} s")
        frames, seconds = future.result()
        expected = (block.last - block.first, block.plan.height, block.plan.width, 3)
        if frames.shape != expected or frames.dtype != np.uint8:
            raise ValueError(
                f"decoding {block} gave {frames.dtype} {list(frames.shape)} instead of uint8 {list(expected)}"
            )
        return frames, seconds

    def _settled(self, future: Future) -> bool:
        """Wait for the decoder; if it hangs, its thread is left alone and the next block gets another."""
        if wait([future], self.settings.decode_timeout_s).done:
            return True
        self._decoder.shutdown(wait=False)
        self._decoder = ThreadPoolExecutor(1, "decoder")
        return False

    def _decode(self, block: Frames) -> tuple[np.ndarray, float]:
        began = time.perf_counter()
        frames = self.frames(block.path, block.plan, block.first, block.last)
        return frames, time.perf_counter() - began
