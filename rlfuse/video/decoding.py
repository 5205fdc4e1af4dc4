"""Reading real video files with PyAV: what a clip is, and the frames that a plan names.

Role: `probe` and `decode` run in the worker processes of `decode_pool`, or directly in a notebook or a test. Nothing
here bounds time: a file that never answers (a dead mount, a pipe) is ended with its process by the pool.
Invariants:
- a frame is the one on the screen at its time, the last that starts no later, at constant and variable rates alike;
- decoding starts at the last keyframe before a named frame, unless what was decoded for the one before is nearer;
- frames come upright and in the plan's size, whatever rotation, pixel shape and format the file has;
- a file that can't give every frame of the plan is a `VideoError` that names it: no frame is made up.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition
from av.video.reformatter import Interpolation, VideoReformatter

from rlfuse.video.errors import VideoError
from rlfuse.video.plan import ClipFacts, VideoPlan

REPLACE = "Replace the file, or drop the row"
# Time stamps were rounded to milliseconds in any clip that was once in Matroska: 1/24 s is 0.042 s there.
ROUNDING_S = 0.001


def probe(path: str) -> ClipFacts:
    """What the clip is. Its first frame is decoded, so that what can't be decoded at all is found here."""
    with _opened(path) as video:
        frame = next(video.frames(), None)
        if frame is None:
            raise VideoError("has no frame", REPLACE)
        width = max(1, round(frame.width * (video.stream.sample_aspect_ratio or 1)))
        sides = (width, frame.height) if frame.rotation % 180 else (frame.height, width)
        timeline = video.timeline
        return ClipFacts(timeline.duration_s, timeline.fps, *sides, timeline.frames)


def decode(
    path: str, plan: VideoPlan, first: int = 0, last: int | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """uint8 [frames, height, width, 3] (RGB): the plan's frames from `first` to before `last`, written to `out`."""
    times = plan.times[first:last]
    pixels = np.empty((len(times), plan.height, plan.width, 3), dtype=np.uint8) if out is None else out
    reformatter = VideoReformatter()
    with _opened(path) as video:
        for place, frame in enumerate(video.shown_at(times)):
            if frame.is_corrupt:
                raise VideoError(f"the frame at {times[place]:g} s is corrupt", REPLACE)
            pixels[place] = _upright(frame, plan.height, plan.width, reformatter)
    return pixels


@dataclass(frozen=True, slots=True)
class _Timeline:
    """When there are frames."""

    duration_s: float
    fps: float
    frames: int
    keyframes: list[int]
    """Ticks where decoding can start, rising. With B-frames they are a few frames before the frame's presentation."""


class _Video:
    """An open file's video stream, for one pass over rising times."""

    def __init__(self, path: str):
        self._path = path
        self._open()
        self._tick_s = float(self.stream.time_base)
        self._start = self.stream.start_time or 0
        self.timeline = self._header() or self._packets()

    def close(self) -> None:
        self._container.close()

    def frames(self) -> Iterator[av.VideoFrame]:
        """All frames from the present position on, in order of presentation."""
        self._at_start = False
        for frame in self._container.decode(self.stream):
            if frame.pts is None:
                raise VideoError("has frames without time stamps", "Put the stream into a container, such as mp4")
            yield frame

    def shown_at(self, times: Sequence[float]) -> Iterator[av.VideoFrame]:
        """The frame on the screen at each of the rising times."""
        held = ahead = None
        for time in times:
            tick = self._tick(time)
            start = self._keyframe_before(tick)
            if held is None or (ahead is not None and start > 0 and self.timeline.keyframes[start] > ahead.pts):
                held = None
                frames, ahead = self._jump(start, tick)
            while ahead is not None and ahead.pts <= tick:
                held, ahead = ahead, self._next(frames, time)
            held = held or ahead  # before the first frame it is the first
            if held is None or (ahead is None and not self._covers(held, tick)):
                raise VideoError(
                    f"ends {f'at {self._end_s(held):g} s' if held else 'without a frame'}, and the plan has a frame at "
                    f"{time:g} s of {self.timeline.duration_s:g} s: it is truncated or its header is wrong",
                    "Fetch it again, or drop the row",
                )
            yield held

    def _jump(self, start: int, tick: int) -> tuple[Iterator[av.VideoFrame], av.VideoFrame | None]:
        """Go to a keyframe, or an earlier one if it is presented after `tick`; its frame, and those that follow it."""
        while True:
            if start:
                self._container.seek(self.timeline.keyframes[start], stream=self.stream)
            elif not self._at_start:  # not every container can seek to its very start
                self.close()
                self._open()
            frames = self.frames()
            ahead = self._next(frames, self._seconds(tick))
            if start == 0 or (ahead is not None and ahead.pts <= tick):
                return frames, ahead
            start -= 1

    def _open(self) -> None:
        self._container = av.open(self._path, metadata_errors="ignore")
        streams = self._container.streams
        moving = [stream for stream in streams.video if not stream.disposition & Disposition.attached_pic]
        if not moving:
            kinds = ", ".join(sorted({stream.type for stream in streams}))
            raise VideoError(f"has no video{kinds and f', only {kinds}'}", "Give a file with video, or drop the row")
        self.stream = moving[0]
        # The pool has a process for each core: threads within one would only wait for each other.
        self.stream.codec_context.thread_count = 1
        self._at_start = True

    def _next(self, frames: Iterator[av.VideoFrame], time: float) -> av.VideoFrame | None:
        try:
            return next(frames, None)
        except av.FFmpegError as error:
            raise VideoError(f"can't be decoded on the way to {time:g} s ({error.strerror})", REPLACE) from error

    def _keyframe_before(self, tick: int) -> int:
        """Its place among the keyframes; 0 where there is none."""
        return max(0, bisect.bisect_right(self.timeline.keyframes, tick) - 1)

    def _tick(self, time: float) -> int:
        return self._start + int((time + ROUNDING_S) / self._tick_s)

    def _seconds(self, tick: int) -> float:
        return (tick - self._start) * self._tick_s

    def _end_s(self, frame: av.VideoFrame) -> float:
        return self._seconds(frame.pts) + max(frame.duration * self._tick_s, 1 / self.timeline.fps)

    def _covers(self, last: av.VideoFrame, tick: int) -> bool:
        """Whether the clip's last frame may still be on the screen, give or take a frame."""
        return self._seconds(tick) < self._end_s(last) + 1 / self.timeline.fps

    def _header(self) -> _Timeline | None:
        """From the container's index, where it has a whole one: MP4 and its relatives, unless fragmented."""
        stream, index = self.stream, self.stream.index_entries
        if "mp4" not in self._container.format.name or not stream.duration or len(index) != stream.frames:
            return None
        duration = stream.duration * self._tick_s
        keyframes = sorted(entry.timestamp for entry in index if entry.is_keyframe)
        return _Timeline(duration, float(stream.average_rate or stream.frames / duration), stream.frames, keyframes)

    def _packets(self) -> _Timeline:
        facts = os.stat(self._path)
        return _read_through(self._path, facts.st_size, facts.st_mtime_ns, self.stream.index)


@lru_cache(maxsize=64)
def _read_through(path: str, size: int, modified_ns: int, stream: int) -> _Timeline:
    """From every packet, none decoded, for containers without an index; once for all parts of a clip."""
    with av.open(path, metadata_errors="ignore") as container:
        video = container.streams[stream]
        rate, tick_s = float(video.average_rate or video.guessed_rate or 0), float(video.time_base)
        usual = 1 / rate / tick_s if rate else 0  # MPEG-TS does not say how long its packets last
        packets = [
            (packet.pts, packet.pts + (packet.duration or usual), packet.is_keyframe)
            for packet in container.demux(video)
            if packet.pts is not None
        ]
    begin, end = min((pts for pts, *_ in packets), default=0), max((end for _, end, _ in packets), default=0)
    duration = (end - begin) * tick_s
    if not duration:
        raise VideoError("has no frame, or none with a time stamp", "Put its stream into a container, such as mp4")
    keyframes = sorted(pts for pts, _, is_keyframe in packets if is_keyframe)
    return _Timeline(duration, rate or len(packets) / duration, len(packets), keyframes)


@contextmanager
def _opened(path: str) -> Iterator[_Video]:
    """The file's video; whatever is wrong with the file becomes a VideoError that names it."""
    try:
        file = Path(path)
        if file.is_dir() or not file.exists():
            raise VideoError("is a folder" if file.is_dir() else "there is no such file", "Correct the row's path")
        if file.is_file() and file.stat().st_size == 0:
            raise VideoError("is empty", REPLACE)
        with closing(_Video(path)) as video:
            yield video
    except VideoError as error:
        raise error.of(path) from error.__cause__
    except (av.FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise VideoError(f"can't be read as a video ({reason})", REPLACE, path) from error


def _upright(frame: av.VideoFrame, height: int, width: int, reformatter: VideoReformatter) -> np.ndarray:
    """uint8 [height, width, 3] as displayed."""
    quarters = round(frame.rotation / 90) % 4
    if quarters % 2:
        height, width = width, height
    resized = reformatter.reformat(
        frame, width=width, height=height, format="rgb24", interpolation=Interpolation.BICUBIC
    )
    return np.rot90(resized.to_ndarray(), quarters)
