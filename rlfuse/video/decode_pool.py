"""Decode in worker processes, bounded in time per clip and in clips and bytes overall.

    stream(clips) --submitted while both bounds allow--> worker process, worker process, ...
         ^------ results in order; requesting the next releases the previous one ----'

A clip that exceeds `timeout_s` or crashes its process is a VideoError. If a worker is killed externally, its clip is
retried, up to ATTEMPTS times. Workers are spawned, so scripts need `if __name__ == "__main__"`.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from rlfuse.cluster.child_processes import PoolContext, end_with_parent, kill_stopped_workers, restore_child_signals
from rlfuse.errors import EngineError, VideoError
from rlfuse.video import decoding, images
from rlfuse.video.clip_metadata import ClipMetadata
from rlfuse.video.images import ImageMetadata
from rlfuse.video.plan import VideoPlan

START_S = 120.0
ATTEMPTS = 3
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals of a decoder crash caused by the file; others come from outside, such as SIGKILL when memory is short."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames `first` to `last` (exclusive; None: the end) of a plan for a file."""

    path: str
    plan: VideoPlan
    first: int = 0
    last: int | None = None
    sample: str = ""

    def __post_init__(self) -> None:
        if not self.plan.times[self.first : self.last]:
            raise ValueError(f"Clip: frames {self.first} to {self.last} of {self.plan.frames} are empty")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.plan.times[self.first : self.last]), self.plan.height, self.plan.width, 3

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True, slots=True)
class _Request:
    """Request to a worker: metadata of a file, or the frames of a clip."""

    path: str
    clip: Clip | None = None
    is_image: bool = False

    @property
    def bytes(self) -> int:
        return self.clip.bytes if self.clip else 0

    def __str__(self) -> str:
        return f"{self.path} (sample {self.clip.sample})" if self.clip and self.clip.sample else self.path


class _Shared:
    """Anonymous shared memory for pixels written by another process; freed with its last mapping or descriptor."""

    def __init__(self, shape: tuple[int, ...]):
        self._file = os.memfd_create("frames")
        os.ftruncate(self._file, int(np.prod(shape)))
        self.pixels = np.frombuffer(mmap.mmap(self._file, 0), np.uint8).reshape(shape)

    @property
    def path(self) -> str:
        """Path by which other processes open it, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class _Call:
    """Request in progress."""

    request: _Request
    future: ProcessFuture
    pool: ProcessPool | None = None
    shared: _Shared | None = None
    attempt: int = 1
    exit_code: int | None = None

    def release(self) -> None:
        """Cancel the call if it is running and close the memory's descriptor; existing arrays remain valid."""
        self.future.cancel()
        if self.shared:
            self.shared.close()


@dataclass(slots=True)
class DecodePool:
    """Pool of decoding processes, started by the first request. Use it as a context manager, or call `close`."""

    workers: int = 1
    timeout_s: float = 60.0
    max_clips: int = 4
    max_bytes: int = 1 << 30
    _pool: ProcessPool | None = field(default=None, init=False, repr=False, compare=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("workers", "timeout_s", "max_clips", "max_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DecodePool.{name}: got {getattr(self, name)}; it must be positive")

    def __reduce__(self) -> tuple:
        return DecodePool, (self.workers, self.timeout_s, self.max_clips, self.max_bytes)

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def probe(self, paths: Iterable[str]) -> Iterator[ClipMetadata | VideoError]:
        return self._in_order(_Request(path) for path in paths)

    def probe_images(self, paths: Iterable[str]) -> Iterator[ImageMetadata | VideoError]:
        return self._in_order(_Request(path, is_image=True) for path in paths)

    def stream(self, clips: Iterable[Clip]) -> Iterator[np.ndarray | VideoError]:
        """Yield the frames of each clip in order, uint8 [frames, height, width, 3]. Decodes ahead within the limits."""
        return self._in_order(_Request(clip.path, clip) for clip in clips)

    def decode(self, path: str, plan: VideoPlan, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the frames of one clip, decoded in a worker. Raises VideoError."""
        [frames] = self.stream([Clip(path, plan, first, last)])
        if isinstance(frames, VideoError):
            raise frames
        return frames

    def close(self) -> None:
        """Terminate the workers. A later request starts new ones."""
        pool, self._pool = self._pool, None
        if pool:
            self._ended.set()
            pool.stop()
            pool.join()

    def _in_order(self, requests: Iterable[_Request]) -> Iterator[Any]:
        requests, ahead, held = iter(requests), deque[_Call](), 0
        upcoming = next(requests, None)
        try:
            while ahead or upcoming:
                while (
                    upcoming and len(ahead) < self.max_clips and (not ahead or held + upcoming.bytes <= self.max_bytes)
                ):
                    ahead.append(self._submit(upcoming))
                    held += upcoming.bytes
                    upcoming = next(requests, None)
                while (result := self._result(ahead[0])) is None:
                    ahead = deque(self._again(call) if self._is_lost(call) else call for call in ahead)
                done = ahead.popleft()
                done.release()
                yield result
                held -= done.request.bytes
        finally:
            for call in ahead:
                call.release()

    def _submit(self, request: _Request) -> _Call:
        clip = request.clip
        if clip is not None and clip.bytes > self.max_bytes:
            future: ProcessFuture = ProcessFuture()
            shape = " x ".join(map(str, clip.shape))
            problem = f"its frames need {clip.bytes} bytes ({shape}), but the pool's limit is {self.max_bytes}"
            future.set_exception(VideoError(problem, "Raise max_bytes, or request the clip in parts"))
            return _Call(request, future)
        return self._schedule(request, _Shared(clip.shape) if clip else None)

    def _again(self, call: _Call) -> _Call:
        code = self._exit_code(call)
        return replace(self._schedule(call.request, call.shared), attempt=call.attempt + 1, exit_code=code)

    def _schedule(self, request: _Request, shared: _Shared | None) -> _Call:
        if shared is not None:
            function, arguments = _decode_into, (shared.path, request.clip)
        else:
            function, arguments = (images if request.is_image else decoding).probe, (request.path,)
        problem: Exception | None = None
        for _ in range(2):
            if self._pool is None:
                self._start()
            try:
                future = self._pool.schedule(function, arguments, timeout=self.timeout_s)
                return _Call(request, future, self._pool, shared)
            except RuntimeError as error:  # raised by pebble for a broken pool, after the death of an idle worker
                problem = error
                self.close()
        raise EngineError(f"the decode workers could not be started: {problem}") from problem

    def _start(self) -> None:
        restore_child_signals()
        self._pool = ProcessPool(self.workers, initializer=_start_worker, context=PoolContext())
        self._ended = threading.Event()
        kill_stopped_workers(self._ended)

    def _is_lost(self, call: _Call) -> bool:
        """Return whether the worker was lost for a reason other than the file."""
        future = call.future
        if not future.done():
            return call.pool is not self._pool
        error = None if future.cancelled() else future.exception()
        if isinstance(error, ProcessExpired):
            return -error.exitcode not in CRASHES
        return isinstance(error, BrokenProcessPool)

    def _exit_code(self, call: _Call) -> int | None:
        error = call.future.exception() if call.future.done() and not call.future.cancelled() else None
        return error.exitcode if isinstance(error, ProcessExpired) else call.exit_code

    def _result(self, call: _Call) -> ClipMetadata | ImageMetadata | np.ndarray | VideoError | None:
        """Return the result of the oldest call; None if it must be retried."""
        limit, future = self.timeout_s, call.future
        if call.pool is self._pool:
            wait([future], START_S + limit)
            if not future.done() or (self._is_lost(call) and isinstance(future.exception(), BrokenProcessPool)):
                self.close()
        if self._is_lost(call) and call.attempt < ATTEMPTS:
            return None
        try:
            facts = future.result(0)
            return call.shared.pixels if call.shared else facts
        except VideoError as error:
            return error.of(str(call.request))
        except TimeoutError:
            if not future.done():
                raise EngineError(f"no decode worker accepted {call.request} within {START_S + limit:g} s") from None
            problem, remedy = (
                f"took longer than {limit:g} s to read and was stopped",
                "Raise timeout_s, or drop the row",
            )
        except (ProcessExpired, BrokenProcessPool) as error:
            if (code := self._exit_code(call)) is None:
                raise EngineError(f"the decode workers failed: {error}") from error
            problem, remedy = f"crashed its decoder (exit code {code})", "Replace the file"
            if self._is_lost(call):
                problem = f"lost its decoder {ATTEMPTS} times (exit code {code})"
                remedy = "Exit code -9 usually means that the system ran out of memory: free memory, or drop the row"
        except Exception as error:
            problem, remedy = f"can't be decoded ({type(error).__name__}: {error})", "Replace the file, or drop the row"
        return VideoError(problem, remedy, str(call.request))


def _start_worker() -> None:
    end_with_parent()
    import torch

    torch.set_num_threads(1)  # the pool has one process per core


def _decode_into(memory: str, clip: Clip) -> None:
    with open(memory, "r+b") as file:
        out = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).reshape(clip.shape)
    if clip.plan.is_image:
        out[:] = images.read(clip.path, clip.plan)
    else:
        decoding.decode(clip.path, clip.plan, clip.first, clip.last, out)
