"""Real video files for the tests, small and quick to write. A frame shows its number as eight bars, black or white."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from rlfuse.video.plan import VideoPlan

BARS = 8
TICKS = 1000
"""A second, in the time base of the files."""


def write_video(
    path: Path,
    seconds: Sequence[float],
    *,
    codec: str = "libx264",
    size: tuple[int, int] = (32, 128),
    rotation: int = 0,
    fps: int = 10,
    **options: str,
) -> str:
    """Frame i appears at `seconds[i]`; `options` are the encoder's and, for `movflags`, the container's."""
    container_options = {key: options.pop(key) for key in ("movflags",) if key in options}
    with av.open(str(path), "w", options=container_options) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, fps if codec == "mpeg4" else TICKS)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, at in enumerate(seconds):
            frame = av.VideoFrame.from_ndarray(numbered(number, *size), "rgb24")
            frame.pts, frame.time_base = round(at / stream.codec_context.time_base), stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return str(path)


def write_sound(path: Path) -> str:
    """A second of silence, and no picture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        for start in range(0, 16_000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 16_000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return str(path)


def steady(frames: int, fps: int = 10) -> list[float]:
    """Appearance of every frame at a constant rate."""
    return [number / fps for number in range(frames)]


def numbered(number: int, height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]: the number's bits from left to right, lowest first."""
    bits = np.array([number >> bit & 1 for bit in range(BARS)], np.uint8) * 255
    return np.broadcast_to(bits.repeat(width // BARS)[None, :, None], (height, width, 3))


def numbers(pixels: np.ndarray) -> list[int]:
    """What is shown in uint8 [frames, height, width, 3]."""
    bars = pixels.mean(axis=(1, 3)).reshape(len(pixels), BARS, -1).mean(axis=2) > 128
    return (bars * (1 << np.arange(BARS))).sum(axis=1).tolist()


def plan_of(times: Sequence[float]) -> VideoPlan:
    """A plan of frames that are large enough to be read by `numbers`."""
    return VideoPlan(tuple(times), 28, 28 * BARS, 1.0, BARS)
