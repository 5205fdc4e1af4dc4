"""Select a file's video stream and find its frame times and keyframes, without decoding.

The stream is the default one, else the longest, never cover art. Packets take precedence over headers; a clip whose
header and time stamps disagree about its length is a `VideoError`. For MP4 at a constant rate the index is sufficient.
"""

from __future__ import annotations

import bisect
import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.format import Flags
from av.stream import Disposition
from av.video.stream import VideoStream

from rlfuse.errors import VideoError
from rlfuse.video.clip_metadata import MIN_STATIC_S, ROUNDING_S

COVERS = {"mjpeg", "png", "bmp", "gif", "webp", "tiff"}
"""Codecs of cover art; cameras use some of them, too."""
CONTAINERS = (
    "mov,matroska,webm,avi,flv,mpegts,mpeg,asf,ogg,mxf,gif,apng,ivf,nut,wtv,dv,rm,gxf,yuv4mpegpipe,"
    "h264,hevc,m4v,mpegvideo,mjpeg,h263,vc1,av1,obu"
)
"""Demuxers that FFmpeg may use, for any file name; the second line has raw streams. Others are excluded because they
open further files or URLs (playlists, concat lists, numbered images, MLV) or are rarely tested."""
MP4, AVI = "mov,mp4,m4a,3gp,3g2,mj2", "avi"
STORES_LENGTH = (MP4, AVI, "matroska,webm", "flv")
"""Containers whose header has a duration; FFmpeg estimates it from time stamps for others."""
UNRELIABLE_AFTER_SEEK = (AVI, "mpeg")
"""Containers without presentation times. Frames can be counted from the start, but after a seek to a keyframe FFmpeg
does not know how many of the following B-frames are presented before it."""
TS = "mpegts"
LOSSY = (TS, "mpeg")
"""Containers for lossy channels: a damaged packet does not mean that the file is truncated."""
RATE_OFF = 0.01
"""Tolerated relative difference of the rates of header and packets."""
LONGEST_JUMP_S = 10.0
"""Longest time stamp jump in containers without a stored duration, unless it is shorter than the rest of the clip."""
MAX_REORDERED = 32
"""Largest difference of a frame's decoding and presentation index: 16 frames of two fields in H.264 and H.265."""
EDITED = "has an edit list with several segments, between which FFmpeg misplaces frames"
UNDECIDED = "has B-frames and {}, but AVI does not store presentation times"
FETCH_AGAIN = "Fetch it again, or drop the row"
REWRITE = "Write it again from its source, or drop the row"
STAMPLESS = "Put the stream into a container, such as mp4"
SEGMENT = b"\x18\x53\x80\x67"
"""Id of the Matroska and WebM segment element, followed by its size."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Frame times of a stream; ticks are in its time base."""

    stream: int
    start: int
    last: int
    duration_s: float
    fps: float
    frames: int
    static_intervals: tuple[tuple[float, float], ...]
    keyframes: list[int]
    """Ticks where decoding can start, in addition to the clip's start; sorted."""
    ticks: tuple[int, ...] = ()
    """All frame times of an AVI with B-frames, which stores decoding times only: frames are assigned by counting."""
    damaged: tuple[tuple[float, float], ...] = ()
    """(begin, end) of groups of pictures with lost packets."""


class _Packet(NamedTuple):
    """Packet of a frame."""

    tick: int
    """Presentation time; decoding time in AVI."""
    decoded: int
    duration: int
    is_keyframe: bool
    is_discard: bool
    is_corrupt: bool


def open_container(path: str) -> InputContainer:
    """Open a file, but no other file that it refers to. Raises av.FFmpegError or VideoError."""
    try:
        return av.open(path, metadata_errors="ignore", container_options={"format_whitelist": CONTAINERS})
    except av.ArgumentError as error:
        problem = "has a damaged header or an unsupported format (playlists and other lists of files are not read)"
        remedy = "Convert it to mp4 or mkv, use separate rows for the files of a list, or drop the row"
        raise VideoError(problem, remedy) from error


def timeline_of(path: str, container: InputContainer) -> Timeline:
    """Return the timeline of an open file's selected stream."""
    if container.format.flags & Flags.no_timestamps.value:
        raise VideoError("is a raw stream without time stamps", STAMPLESS)
    streams, facts = _moving(container), os.stat(path)
    alone = len(streams) == 1 and streams[0].codec_context.name not in COVERS
    if alone and (known := _index(container, streams[0], facts.st_size)):
        return known
    return _read_through(path, facts.st_size, facts.st_mtime_ns)


def _moving(container: InputContainer) -> list[VideoStream]:
    covers = Disposition.attached_pic
    return [s for s in container.streams if s.type == "video" and s.codec_context and not s.disposition & covers]


def _index(container: InputContainer, stream: VideoStream, size: int) -> Timeline | None:
    """Return the timeline from an MP4 index; None if it is incomplete or the rate varies.

    Keyframes are shifted by the delay between decoding and presentation times, since FFmpeg seeks by the latter.
    """
    index = stream.index_entries
    if container.format.name != MP4 or not stream.duration or not stream.frames or len(index) != stream.frames:
        return None
    tick_s, start = float(stream.time_base), stream.start_time or 0
    ticks, is_keyframe = np.array([(entry.timestamp, entry.is_keyframe) for entry in index]).T
    duration, end = stream.duration * tick_s, ticks[0] + stream.duration
    if (reached := max(entry.pos + entry.size for entry in index)) > size:
        raise VideoError(f"has {size} bytes, but its index refers to byte {reached}: it is truncated", FETCH_AGAIN)
    # The end counts as a frame: if the last frame's duration differs, B-frames may hide more gaps.
    if (
        not is_keyframe[0]
        or (np.diff(ticks) < 0).any()
        or _stills(np.append(ticks, end), end, tick_s)
        or _too_long(np.ptp(ticks) * tick_s, duration)
    ):
        return None
    _check_length(container, stream, [ticks], end - ticks[-1], cut=False)
    fps = _rate(stream, duration / len(index))
    last = start + round((duration - 1 / fps) / tick_s)
    keyframes = np.sort(ticks[is_keyframe > 0] + start - ticks[0]).tolist()
    return Timeline(stream.index, start, last, duration, fps, len(index), (), keyframes)


@lru_cache(maxsize=64)
def _read_through(path: str, size: int, modified_ns: int) -> Timeline:
    with open_container(path) as container:
        name, streams, read = container.format.name, _moving(container), defaultdict(list)
        latest, stampless = defaultdict(lambda: -math.inf), Counter()
        for packet in container.demux(streams) if streams else ():
            if name == MP4 and packet.dts is not None:
                if packet.dts < latest[packet.stream_index]:
                    raise VideoError(EDITED, "Write it again with its edits applied, or drop the row")
                latest[packet.stream_index] = packet.dts
            if packet.is_corrupt and name not in LOSSY:
                raise VideoError("ends within a picture: it is truncated", FETCH_AGAIN)
            tick = packet.dts if name == AVI else packet.pts
            if packet.size and tick is not None:
                decoded = tick if packet.dts is None else packet.dts
                kinds = packet.is_keyframe, packet.is_discard, packet.is_corrupt
                read[packet.stream_index].append(_Packet(tick, decoded, packet.duration or 0, *kinds))
            elif packet.size:
                stampless[packet.stream_index] += 1
        packets = defaultdict(list, {index: _decodable(of) for index, of in read.items()})
        stream = _chosen(container, streams, packets)
        if stampless[stream.index] > len(read[stream.index]):  # second fields have no time stamps
            raise VideoError("has frames without time stamps", STAMPLESS)
        if _is_counted(container, stream) and not read[stream.index][0].is_keyframe:
            raise VideoError(UNDECIDED.format("no keyframe at its start"), REWRITE)
        if name == "gif" and not _has_trailer(path, size):
            raise VideoError("lacks its last byte: it is truncated", FETCH_AGAIN)
        return _timeline(container, stream, packets[stream.index], _is_cut(path, size))


def _chosen(container: InputContainer, streams: list[VideoStream], packets: dict[int, list[_Packet]]) -> VideoStream:
    def rank(stream: VideoStream) -> tuple[bool, bool, float]:
        ticks = [packet.tick for packet in packets[stream.index]]
        is_default = bool(stream.disposition & Disposition.default)
        return len(ticks) > 1, is_default, (max(ticks) - min(ticks)) * float(stream.time_base)

    covers = [s for s in streams if s.codec_context.name in COVERS and len(packets[s.index]) == 1]
    if len(container.streams) > 1:
        streams = [stream for stream in streams if stream not in covers]
    if not streams:
        kinds = {stream.type: stream.type for stream in container.streams} | {"video": "cover art"}
        kinds |= {} if all(s.codec_context for s in container.streams.video) else {"video": "video of an unknown codec"}
        found = " and ".join(sorted({kinds[stream.type] for stream in container.streams}, reverse=True))
        raise VideoError(f"has no video{found and f', only {found}'}", "Give a file with video, or drop the row")
    filled = [stream for stream in streams if packets[stream.index]]
    if not filled:
        raise VideoError("has no frames with time stamps", STAMPLESS)
    return max(filled, key=rank)


def _timeline(container: InputContainer, stream: VideoStream, packets: list[_Packet], cut: bool) -> Timeline:
    tick_s, counted = float(stream.time_base), _is_counted(container, stream)
    presented = np.array([packet.tick for packet in packets])
    order = np.argsort(presented, kind="stable")
    ticks = presented[order]
    gaps = np.diff(ticks)
    if counted and len(gaps) and np.ptp(gaps) * tick_s > MIN_STATIC_S:
        raise VideoError(UNDECIDED.format("pauses"), REWRITE)
    # AVI has no packet durations, and its rate may be that of its clock: a single frame lasts as long as the stream.
    lone = stream.duration if len(ticks) == 1 and container.format.name == AVI and not cut else None
    apart = gaps.mean() if gaps.any() else lone
    fps = _rate(stream, apart and apart * tick_s)
    stays = lone or packets[order[-1]].duration  # not in every container
    end = ticks[-1] + (stays or (np.median(gaps) if gaps.any() else 1 / fps / tick_s))
    astray = int(np.argmax(np.abs(order - np.arange(len(order)))))
    if abs(order[astray] - astray) > MAX_REORDERED:
        problem = f"has a frame stamped {(ticks[astray] - ticks[0]) * tick_s:g} s among frames of other times"
        raise VideoError(f"{problem}: a time stamp is damaged", REWRITE)
    in_mp4 = container.format.name == MP4  # its headers count decoding or presentation times
    clocks = [ticks, np.array(sorted(packet.decoded for packet in packets))] if in_mp4 else [ticks]
    _check_length(container, stream, clocks, end - ticks[-1], cut)
    if in_mp4 and (stated := ticks[0] + (stream.duration or 0)) > ticks[-1]:
        end = min(end, stated)  # packet durations are in decoding time
    static_intervals = _stills(ticks, end, tick_s)
    if static_intervals and not in_mp4:  # if packet durations are wrong, so is the last one
        end = max(end, _header_s(container) / tick_s or 2 * ticks[-1] - ticks[-2])
        static_intervals = _stills(ticks, end, tick_s)
    duration = float(end - ticks[0]) * tick_s
    keyframes = sorted(packet.tick for packet in packets if packet.is_keyframe)
    if container.format.name in UNRELIABLE_AFTER_SEEK and stream.codec_context.has_b_frames:
        keyframes = []
    shown = tuple(ticks.tolist())
    return Timeline(
        stream.index,
        shown[0],
        shown[-1],
        duration,
        fps,
        len(shown),
        static_intervals,
        keyframes,
        ticks=shown if counted else (),
        damaged=_damaged(packets) if container.format.name == TS else (),
    )


def _decodable(packets: list[_Packet]) -> list[_Packet]:
    """Return the presented packets from the first keyframe on; all if none is marked as a keyframe."""
    first = next((place for place, packet in enumerate(packets) if packet.is_keyframe), 0)
    decoded, begin = packets[first:], packets[first].tick
    following = [packet for packet in decoded[:MAX_REORDERED] if packet.tick >= begin]
    return [packet for packet in following + decoded[MAX_REORDERED:] if not packet.is_discard]


def _damaged(packets: list[_Packet]) -> tuple[tuple[float, float], ...]:
    """Return damaged groups of pictures.

    FFmpeg marks a packet up to two before the loss; if a group begins there, recordings were concatenated or the
    previous group's end was lost.
    """
    keys, spans = [place for place, packet in enumerate(packets) if packet.is_keyframe], []
    for place in (place for place, packet in enumerate(packets) if packet.is_corrupt):
        group = bisect.bisect_right(keys, place)
        end = keys[group] if group < len(keys) else len(packets)
        if group and end > place + 2:
            spans.append((packets[keys[group - 1]].tick, packets[end].tick if end < len(packets) else math.inf))
    return tuple(spans)


def _is_counted(container: InputContainer, stream: VideoStream) -> bool:
    return container.format.name == AVI and stream.codec_context.has_b_frames


def _rate(stream: VideoStream, apart_s: float | None) -> float:
    stated = float(stream.average_rate or stream.guessed_rate or 0)
    if apart_s and abs(stated * apart_s - 1) > RATE_OFF:
        return float(1 / apart_s)
    if not stated:
        raise VideoError("has one frame, or none with a time stamp", STAMPLESS)
    return stated


def _stills(ticks: np.ndarray, end: float, tick_s: float) -> tuple[tuple[float, float], ...]:
    begins = (ticks - ticks[0]) * tick_s
    ends = np.append(begins[1:], (end - ticks[0]) * tick_s)
    stays = ends - begins
    if len(ticks) == 1 or not (stays > MIN_STATIC_S).any():
        return ()
    usual = stays[:-1].mean()
    astray = np.abs(begins - usual * np.arange(len(ticks))).max()  # one short frame shifts all later ones
    if max(astray, stays[-1] - usual) <= 2 * ROUNDING_S:
        return ()
    listed = (stays > MIN_STATIC_S) | (stays.mean() > MIN_STATIC_S)
    return tuple(zip(begins[listed].tolist(), ends[listed].tolist(), strict=True))


def _check_length(
    container: InputContainer, stream: VideoStream, clocks: Sequence[np.ndarray], last: float, cut: bool
) -> None:
    tick_s, header = float(stream.time_base), _header_s(container)
    length = min(clock[-1] - clock[0] + last for clock in clocks) * tick_s
    reached = max(clock[-1] - min(0, clock[0]) + last for clock in clocks) * tick_s
    longest = max(float(np.diff(clock).max(initial=0)) for clock in clocks) * tick_s
    if _too_long(length, header):
        problem = f"has time stamps over {length:g} s, but its header gives {header:g} s: one of them is damaged"
        raise VideoError(problem, REWRITE)
    if container.format.name not in STORES_LENGTH and longest > max(LONGEST_JUMP_S, length - longest):
        problem = f"has time stamps over {length:g} s, with a jump of {longest:g} s between two frames"
        raise VideoError(problem, REWRITE)
    # Only MP4 and AVI have a duration per stream; others include audio before and after the video.
    own = (stream.duration or 0) * tick_s if container.format.name in (MP4, AVI) else 0.0
    stated = own or (header if cut or len(container.streams) == 1 else 0.0)
    if stated - reached > (MIN_STATIC_S if cut else min(1.0, 0.1 * stated) + longest):
        raise VideoError(f"ends at {length:g} s, but its header gives {stated:g} s: it is truncated", FETCH_AGAIN)


def _too_long(length_s: float, header_s: float) -> bool:
    return header_s > 0 and length_s > 1.1 * header_s + MIN_STATIC_S


def _header_s(container: InputContainer) -> float:
    return (container.duration or 0) / av.time_base if container.format.name in STORES_LENGTH else 0.0


def _is_cut(path: str, size: int) -> bool:
    """Return whether the file is shorter than its AVI or Matroska header states; live recordings have no length."""
    with open(path, "rb") as file:
        head = file.read(4096)
    if head.startswith(b"RIFF"):
        return size < int.from_bytes(head[4:8], "little") + 8 < 1 << 32
    place = head.find(SEGMENT) + len(SEGMENT)
    if place < len(SEGMENT) or place == len(head):
        return False
    digits = 9 - head[place].bit_length()  # EBML: leading zeros plus one
    unknown = (1 << 7 * digits) - 1
    stated = int.from_bytes(head[place : place + digits]) & unknown
    return stated != unknown and place + digits + stated > size


def _has_trailer(path: str, size: int) -> bool:
    with open(path, "rb") as file:
        file.seek(max(0, size - 4096))
        return file.read().rstrip(b"\0\r\n").endswith(b";")
