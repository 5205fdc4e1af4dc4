"""Write small real video files for tests; each frame shows its number as eight black or white bars."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.codec.context import Flags
from av.filter import Graph
from av.stream import Disposition
from av.video.format import VideoFormat

from rlfuse.video.decoding import decode, probe
from rlfuse.video.plan import VideoPlan

BARS = 8
TICKS = 1000
"""Ticks per second in the time base of the files."""
MUXER = ("movflags", "output_ts_offset", "use_editlist", "live", "mpegts_m2ts_mode", "segment_time")
"""Options of the muxer."""
NONE, DEFAULT, COVER = Disposition(0), Disposition.default, Disposition.attached_pic
PYRAMID = {"bf": "3", "b_strategy": "0", "g": "12", "x264-params": "b-pyramid=normal"}
OPEN = {"bf": "3", "b_strategy": "0", "g": "12", "x264-params": "open-gop=1:scenecut=0"}
MPEG4 = {"codec": "mpeg4", "bf": "3", "g": "20"}
MJPEG = {"codec": "mjpeg", "pix_fmt": "yuvj420p"}
MPEG2 = {"codec": "mpeg2video", "bf": "2", "fps": 25}
X265 = {"codec": "libx265", "x265-params": "bframes=4:keyint=12:open-gop=1:log-level=none"}
VP9 = {
    "codec": "libvpx-vp9",
    "g": "20",
    "auto-alt-ref": "1",
    "lag-in-frames": "16",
    "deadline": "good",
    "cpu-used": "5",
}
TURNS = {
    (1, 0, 0, 1): "RGBW",
    (-1, 0, 0, 1): "GRWB",
    (1, 0, 0, -1): "BWRG",
    (-1, 0, 0, -1): "WBGR",
    (0, 1, -1, 0): "BRWG",
    (0, -1, 1, 0): "GWRB",
    (0, 1, 1, 0): "RBGW",
    (0, -1, -1, 0): "WGBR",
}
"""Display matrices of all rotations by 90 degrees and mirrorings -> the resulting colours of the quarters."""
UNEVEN = np.cumsum([0] + [0.05, 0.3, 0.1, 1.2, 0.05, 0.15, 0.8] * 4).round(2).tolist()
"""Presentation times of frames in seconds, multiples of 0.05."""
COLOURS = {"R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255), "W": (255, 255, 255)}


def write_video(
    path: Path,
    seconds: Sequence[float],
    *,
    codec: str = "libx264",
    size: tuple[int, int] = (32, 128),
    rotation: int = 0,
    fps: int = 10,
    pix_fmt: str = "yuv420p",
    container: str | None = None,
    **options: str,
) -> str:
    """Write a video with frame i presented at `seconds[i]`; those of `options` in `MUXER` are the muxer's."""
    container_options = {key: options.pop(key) for key in MUXER if key in options}
    with av.open(str(path), "w", container, options=container_options) as output:
        stream = output.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt
        stream.codec_context.time_base = Fraction(1, fps if codec.startswith("mpeg") else TICKS)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, at in enumerate(seconds):
            frame = av.VideoFrame.from_ndarray(numbered(number, *size), "rgb24")
            frame.pts, frame.time_base = round(at / stream.codec_context.time_base), stream.codec_context.time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return str(path)


def write_streams(path: Path, *streams: tuple[str, int, int, Disposition], sound_s: float = 0.0, late: int = 0) -> str:
    """Write streams (codec, first number, frames at 10 fps, disposition), and silence from `late` frames earlier on."""
    with av.open(str(path), "w") as container:
        outputs = [container.add_stream(codec, rate=10) for codec, *_ in streams]
        sound = container.add_stream("aac", rate=16_000) if sound_s else None
        for stream, (codec, _, _, disposition) in zip(outputs, streams, strict=True):
            stream.height, stream.width, stream.pix_fmt = 32, 128, "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.disposition = disposition
        for stream, (_, first, count, _) in zip(outputs, streams, strict=True):
            for number in range(count):
                frame = av.VideoFrame.from_ndarray(numbered(first + number, 32, 128), "rgb24")
                frame.pts, frame.time_base = late + number, Fraction(1, 10)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        if sound is not None:
            _mux_silence(container, sound, sound_s)
    return str(path)


def write_interlaced(
    path: Path,
    frames: int,
    size: tuple[int, int],
    step: int,
    *,
    codec: str = "libx264",
    order: str = "bff",
    pix_fmt: str = "yuv420p",
    **options: str,
) -> str:
    """Write a white bar that moves right by `step` pixels per field at 50 fields/s; `order`: tff or bff."""
    fields = Graph()
    source = fields.add_buffer(width=size[1], height=size[0], format=VideoFormat(pix_fmt), time_base=Fraction(1, 25))
    fields.link_nodes(source, fields.add("setfield", order), fields.add("buffersink")).configure()
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.height, stream.width, stream.pix_fmt = *size, pix_fmt
        stream.codec_context.flags |= Flags.interlaced_dct | Flags.interlaced_me
        for number in range(frames):
            pixels = np.zeros((*size, 3), np.uint8)
            for field in (0, 1):
                left = (2 * number + field) * step
                pixels[field if order == "tff" else 1 - field :: 2, left : left + 32] = 255
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format=pix_fmt)
            frame.pts, frame.time_base = number, Fraction(1, 25)
            fields.vpush(frame)
            flagged = fields.vpull()
            flagged.pict_type = 0
            container.mux(stream.encode(flagged))
        container.mux(stream.encode(None))
    return str(path)


def write_turned(path: Path, matrix: tuple[int, int, int, int]) -> str:
    """Write one frame of four colours with this display matrix: x' = a x + c y, y' = b x + d y."""
    quarters = np.array(list(COLOURS.values()), np.uint8).reshape(2, 2, 3)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = 64, 128, "yuv444p"
        frame = av.VideoFrame.from_ndarray(quarters.repeat(32, axis=0).repeat(64, axis=1), "rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data, one = path.read_bytes(), 1 << 16
    place = data.index(struct.pack(">3i", one, 0, 0), data.rindex(b"tkhd"))
    a, b, c, d = (one * value for value in matrix)
    path.write_bytes(data[:place] + struct.pack(">6i", a, b, 0, c, d, 0) + data[place + 24 :])
    return str(path)


def write_packed(path: Path, frames: int) -> str:
    """Write MPEG-4 in AVI as DivX did: a B-frame is in the chunk of the previous frame, and an empty chunk follows."""
    plain = write_video(path, steady(frames), codec="mpeg4", bf="1", b_strategy="0", g="12", sc_threshold="1000000000")
    start = b"\0\0\1\xb6"
    with av.open(plain) as container:
        video = container.streams.video[0]
        encoder, divx = re.search(rb"Lavc[\d.]+", video.codec_context.extradata)[0], b"DivX503b1393p"
        chunks: list[bytes] = []
        for packet in container.demux(video):
            data = bytes(packet).replace(encoder, divx)
            if data and data[data.index(start) + 4] >> 6 == 2:
                chunks[-1] += data
                chunks.append(start + bytes([0b01010000, 0b10111111]))
            elif data:
                chunks.append(data)
        with av.open(packed := str(path.with_stem("packed")), "w") as output:
            stream = output.add_stream_from_template(video)
            for number, data in enumerate(chunks):
                packet = av.Packet(data)
                packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 10)
                packet.is_keyframe = data[data.index(start) + 4] >> 6 == 0
                output.mux(packet)
    return packed


def write_packets(path: Path, *sources: str, first: int = 0) -> str:
    """Concatenate the packets of files of one codec, without the first `first` packets."""
    with ExitStack() as stack:
        opened = [stack.enter_context(av.open(source)).streams.video[0] for source in sources]
        output = stack.enter_context(av.open(str(path), "w"))
        stream, offset = output.add_stream_from_template(opened[0]), 0
        for video in opened:
            packets = [packet for packet in video.container.demux(video) if packet.size]
            for packet in packets[first:]:
                packet.pts, packet.dts, packet.stream = packet.pts + offset, packet.dts + offset, stream
                output.mux(packet)
            offset += round(len(packets) / video.average_rate / video.time_base)
            first = 0
    return str(path)


def write_edited(path: Path, whole: str, parts: Sequence[tuple[float | None, float]]) -> str:
    """Write an MP4 with this edit list: parts of (start in seconds or None for an empty edit, duration in seconds)."""
    data = bytearray(Path(whole).read_bytes())
    with av.open(whole) as container:
        ticks = container.streams.video[0].time_base.denominator
    place = data.rindex(b"elst") - 4
    (size,), (first,) = struct.unpack_from(">I", data, place), struct.unpack_from(">I", data, place + 20)
    (scale,) = struct.unpack_from(">I", data, data.rindex(b"mvhd") + 16)
    edits = [(round(long * scale), -1 if at is None else first + round(at * ticks), 1 << 16) for at, long in parts]
    new = struct.pack(">4sII", b"elst", 0, len(edits)) + b"".join(struct.pack(">IiI", *edit) for edit in edits)
    data[place : place + size] = struct.pack(">I", len(new) + 4) + new
    for box in (b"edts", b"trak", b"moov"):
        start = data.rindex(box, 0, place) - 4
        struct.pack_into(
            ">I", data, start, *(old + len(new) + 4 - size for old in struct.unpack_from(">I", data, start))
        )
    path.write_bytes(data)
    return str(path)


def write_blank(path: Path, size: tuple[int, int], aspect: int = 1) -> str:
    """Write one black frame with this pixel aspect ratio."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        container.mux(stream.encode(av.VideoFrame(*reversed(size), "yuv420p")))
        container.mux(stream.encode(None))
    return str(path)


def write_sound(path: Path) -> str:
    """Write one second of silence without video."""
    with av.open(str(path), "w") as container:
        _mux_silence(container, container.add_stream("aac", rate=16_000), 1.0)
    return str(path)


def _mux_silence(container: av.container.OutputContainer, stream: av.AudioStream, seconds: float) -> None:
    for start in range(0, int(16_000 * seconds), 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = 16_000, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def steady(frames: int, fps: int = 10) -> list[float]:
    """Return the presentation times of frames at a constant rate, in seconds."""
    return [number / fps for number in range(frames)]


def numbered(number: int, height: int, width: int) -> np.ndarray:
    """Return uint8 [height, width, 3] that shows the number's bits from left to right, lowest first."""
    bits = np.array([number >> bit & 1 for bit in range(BARS)], np.uint8) * 255
    row = np.pad(bits.repeat(width // BARS), (0, width % BARS), "edge")
    return np.broadcast_to(row[None, :, None], (height, width, 3))


def numbers(pixels: np.ndarray) -> list[int]:
    """Return the numbers shown in uint8 [frames, height, width, 3]."""
    bars = pixels.mean(axis=(1, 3)).reshape(len(pixels), BARS, -1).mean(axis=2) > 128
    return (bars * (1 << np.arange(BARS))).sum(axis=1).tolist()


def plan_of(times: Sequence[float]) -> VideoPlan:
    """Return a plan with frames large enough to be read by `numbers`."""
    return VideoPlan(tuple(times), 28, 28 * BARS, 1.0, BARS)


def assert_shows(path: str, appearances: list[float]) -> None:
    """Check the numbers of frames at and just before their presentation times, and that few frames decode bitwise equal
    to those of the whole clip."""
    facts = probe(path)
    assert facts.frames == len(appearances)
    assert facts.duration_s == pytest.approx(appearances[-1], abs=1.3) and facts.duration_s > appearances[-1]
    last = len(appearances) - 1
    whole = decode(path, plan_of(appearances))
    assert numbers(whole) == list(range(last + 1))
    before = [at - 0.002 for at in appearances[1:]]
    assert numbers(decode(path, plan_of(before))) == list(range(last))
    rng = random.Random(0)
    for size in (1, 1, 2, 4, 1, 2, 4, 8):
        few = sorted(rng.sample(range(last + 1), size))
        assert np.array_equal(decode(path, plan_of([appearances[number] for number in few])), whole[few])
