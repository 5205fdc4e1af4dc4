"""Read video files with PyAV: metadata of a clip, and the frames of a plan. `DecodePool` limits the time.

The frame at a time is the last one that starts no later. Decoding starts at the last keyframe before it; frames decoded
before the first keyframe are dropped. A file that lacks a frame of the plan is a `VideoError`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from rlfuse.errors import VideoError
from rlfuse.video import display, images
from rlfuse.video.clip_metadata import MIN_STATIC_S, ROUNDING_S, ClipMetadata
from rlfuse.video.frame_list import FrameList, read_frame_list
from rlfuse.video.plan import VideoPlan
from rlfuse.video.timeline import AVI, FETCH_AGAIN, REWRITE, STAMPLESS, open_container, timeline_of

REPLACE = "Replace the file, or drop the row"
MAX_ASPECT_CHANGE = 0.02
"""Largest relative change of the aspect ratio within a clip: a plan has one size for all frames."""
T = TypeVar("T")
Neighbours = tuple[av.VideoFrame | None, av.VideoFrame, av.VideoFrame | None]


def probe(path: str) -> ClipMetadata:
    """Return a clip's metadata. Its first frame is decoded to detect files that can't be decoded at all."""
    if listed := read_frame_list(path):
        return _probe_list(listed)
    with _opened(path) as video:
        frame = next(video.frames(), None)
        if frame is None:
            raise VideoError("has no frame", REPLACE)
        height, width = display.displayed_size(frame, float(video.stream.sample_aspect_ratio or 1))
        timeline = video.timeline
        return ClipMetadata(
            timeline.duration_s, timeline.fps, height, width, timeline.frames, timeline.static_intervals
        )


def decode(
    path: str, plan: VideoPlan, first: int = 0, last: int | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """Decode the plan's frames `first` to `last` (exclusive) into `out`: uint8 [frames, height, width, 3] (RGB)."""
    times = plan.times[first:last]
    pixels = np.empty((len(times), plan.height, plan.width, 3), dtype=np.uint8) if out is None else out
    if listed := read_frame_list(path):
        for place, time in enumerate(times):
            frame = listed.frames[round(time * listed.fps)]  # planned times are those of frames
            pixels[place] = _of_frame(frame, images.read, plan)
        return pixels
    reformatter = VideoReformatter()
    with _opened(path) as video:
        for place, (before, frame, after) in enumerate(video.presented_at(times)):
            if frame.is_corrupt:
                raise VideoError(f"the frame at {times[place]:g} s is corrupt", REPLACE)
            if frame.interlaced_frame:
                frame = display.deinterlace(before, frame, after)
            pixels[place] = display.to_displayed_rgb(frame, plan.height, plan.width, reformatter)
    return pixels


def _probe_list(listed: FrameList) -> ClipMetadata:
    facts = [_of_frame(frame, images.probe) for frame in listed.frames]
    first, count = facts[0], len(facts)
    for each in facts:
        _check_shape((first.width, first.height), (each.width, each.height))
    return ClipMetadata(count / listed.fps, listed.fps, first.height, first.width, count, is_list=True)


def _of_frame(path: str, read: Callable[..., T], *arguments: Any) -> T:
    try:
        return read(path, *arguments)
    except VideoError as error:
        raise VideoError(f"its frame {path}: {error.problem}", error.remedy) from error


def _check_shape(first: tuple[int, int], size: tuple[int, int]) -> None:
    (width, height), (across, down) = first, size
    if abs(across * height - width * down) > MAX_ASPECT_CHANGE * width * down:
        shapes = f"{width} x {height} pixels to {across} x {down}"
        raise VideoError(f"changes its aspect ratio, from {shapes}", "Split it there, or drop the row")


class _Video:
    """Video stream of an open file, for one pass over increasing times."""

    def __init__(self, path: str):
        self._path = path
        self._container = open_container(path)
        self.timeline = timeline_of(path, self._container)
        self._prepare()
        self._tick_s = float(self.stream.time_base)
        self._frame_s = 1 / self.timeline.fps

    def close(self) -> None:
        self._container.close()

    def frames(self) -> Iterator[av.VideoFrame]:
        """Yield all frames from the current position on, in presentation order."""
        self._at_start = False
        counted = iter(self.timeline.ticks)
        for frame in self._container.decode(self.stream):
            if self.timeline.ticks:
                frame.pts = next(counted, self.timeline.last)
            elif self._container.format.name == AVI:
                frame.pts = frame.dts
            if frame.pts is None:
                raise VideoError("has frames without time stamps", STAMPLESS)
            if frame.pts < self.timeline.start:
                continue
            if frame.interlaced_frame and self.stream.codec_context.name == "hevc":
                problem = "stores each field as a separate picture of half the height (H.265)"
                raise VideoError(problem, "Deinterlace it, or drop the row")
            _check_shape(self._size, (frame.width, frame.height))
            if (at := self._seconds(frame.pts)) > self.timeline.duration_s + 1 + self._frame_s:
                header = f"its header gives {self.timeline.duration_s:g} s"
                raise VideoError(f"has a frame stamped {at:g} s, but {header}: one of them is damaged", REWRITE)
            yield frame

    def presented_at(self, times: Sequence[float]) -> Iterator[Neighbours]:
        """Yield (previous, current, next) frame for each of the increasing times; neighbours only if decoded."""
        before = held = ahead = None
        for time in times:
            tick = self._tick(time)
            for begin, end in self.timeline.damaged:
                if begin <= tick < end:
                    raise VideoError(f"lost packets between its keyframes around {time:g} s", FETCH_AGAIN)
            start = self._keyframe_before(tick)
            if held is None or (ahead is not None and start > 0 and self.timeline.keyframes[start] > ahead.pts):
                before = held = None
                frames, ahead = self._jump(start, tick)
            while ahead is not None and ahead.pts <= tick:
                before, held, ahead = held, ahead, self._after(ahead, frames, time)
                if before is None and start and held.interlaced_frame and (ahead is None or ahead.pts > tick):
                    start, held = start - 1, None  # deinterlacing must not depend on the start of decoding
                    frames, ahead = self._jump(start, tick)
            if held is None and ahead is not None:  # times before the first frame show the first frame
                held, ahead = ahead, self._after(ahead, frames, time)
            if held is None or (ahead is None and not self._covers(held, tick)):
                raise VideoError(
                    f"ends {f'at {self._end_s(held):g} s' if held else 'without a frame'}, but the plan has a frame at "
                    f"{time:g} s of {self.timeline.duration_s:g} s: it is truncated or its header is wrong",
                    FETCH_AGAIN,
                )
            yield before, held, ahead

    def _jump(self, start: int, tick: int) -> tuple[Iterator[av.VideoFrame], av.VideoFrame | None]:
        """Seek to a keyframe presented at or before `tick`, retrying further back if the container seeks past it."""
        step = 1
        while True:
            if start:
                self._container.seek(self.timeline.keyframes[start], stream=self.stream)
            elif not self._at_start:  # not all containers can seek to the start
                self.close()
                self._container = open_container(self._path)
                self._prepare()
            frames = self.frames()
            ahead = self._arrival(frames, tick) if start else self._next(frames, self._seconds(tick))
            if start == 0 or (ahead is not None and ahead.key_frame and ahead.pts <= tick):
                return frames, ahead
            start, step = max(0, start - step), 2 * step

    def _arrival(self, frames: Iterator[av.VideoFrame], tick: int) -> av.VideoFrame | None:
        try:
            return next((frame for frame in frames if frame.key_frame or frame.pts > tick), None)
        except av.FFmpegError:
            return None

    def _prepare(self) -> None:
        self.stream = self._container.streams[self.timeline.stream]
        # The pool has one process per core, so more threads would only compete.
        self.stream.codec_context.thread_count = 1
        self._size = self.stream.codec_context.width, self.stream.codec_context.height
        self._at_start = True

    def _after(self, frame: av.VideoFrame, frames: Iterator[av.VideoFrame], time: float) -> av.VideoFrame | None:
        following = self._next(frames, time)
        if following is not None and following.pts < frame.pts:
            stamps = f"{self._seconds(following.pts):g} s after one of {self._seconds(frame.pts):g} s"
            raise VideoError(f"has a frame stamped {stamps}: its time stamps are damaged", REWRITE)
        return following

    def _next(self, frames: Iterator[av.VideoFrame], time: float) -> av.VideoFrame | None:
        try:
            return next(frames, None)
        except av.FFmpegError as error:
            raise VideoError(f"can't be decoded up to {time:g} s ({error.strerror})", REPLACE) from error

    def _keyframe_before(self, tick: int) -> int:
        return max(0, bisect.bisect_right(self.timeline.keyframes, tick) - 1)

    def _tick(self, time: float) -> int:
        return self.timeline.start + int((time + ROUNDING_S) / self._tick_s)

    def _seconds(self, tick: int) -> float:
        return (tick - self.timeline.start) * self._tick_s

    def _end_s(self, frame: av.VideoFrame) -> float:
        return self._seconds(frame.pts) + max(frame.duration * self._tick_s, self._frame_s)

    def _covers(self, last: av.VideoFrame, tick: int) -> bool:
        slack = MIN_STATIC_S if self.timeline.static_intervals else self._frame_s
        missing = self._seconds(self.timeline.last) - self._seconds(last.pts)
        return missing <= slack and self._seconds(tick) <= self.timeline.duration_s + slack


@contextmanager
def _opened(path: str) -> Iterator[_Video]:
    try:
        file = Path(path)
        if file.is_dir() or not file.exists():
            raise VideoError("is a folder" if file.is_dir() else "does not exist", "Correct the row's path")
        if file.is_file() and file.stat().st_size == 0:
            raise VideoError("is empty", REPLACE)
        with closing(_Video(path)) as video:
            yield video
    except VideoError as error:
        raise error.of(path) from error.__cause__
    except (av.FFmpegError, OSError, IndexError) as error:  # IndexError: PyAV, for a stream missing from the header
        reason = getattr(error, "strerror", None) or str(error)
        raise VideoError(f"can't be read as a video ({reason})", REPLACE, path) from error
