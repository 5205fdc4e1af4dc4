"""Convert a decoded frame to displayed pixels: deinterlaced, SDR, resized, upright.

Progressive, unrotated SDR frames have no extra cost. PQ and HLG are tone-mapped to SDR with reference white (203 cd/m2,
ITU-R BT.2408) kept within a few per cent; FFmpeg's own conversion takes 3.5 s per clip and clips highlights.
"""

from __future__ import annotations

from functools import cache

import av
import numpy as np
from av.filter import Graph
from av.video.reformatter import ColorPrimaries, ColorTrc, VideoReformatter

from rlfuse.errors import VideoError

WHITE = 203.0
"""HDR reference white, in cd/m2."""
PEAK = 1000.0 / WHITE
"""Luminance mapped to the brightest SDR white, relative to reference white: that of HLG displays, most PQ masters."""
KNEE = 0.3
"""Luminance up to which tone mapping is linear; also FFmpeg's default for its Mobius curve."""
HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)
LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)
TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)  # ITU-R BT.2087, from BT.2020


def displayed_size(frame: av.VideoFrame, aspect: float) -> tuple[int, int]:
    """Return height and width as displayed, with square pixels; `aspect`: pixel aspect ratio of the source."""
    height, width = frame.height, max(1, round(frame.width * aspect))
    return (width, height) if _turn(frame)[0] else (height, width)


def deinterlace(before: av.VideoFrame | None, frame: av.VideoFrame, after: av.VideoFrame | None) -> av.VideoFrame:
    """Return the frame at the time of its first field; the other rows are interpolated, also from its neighbours."""
    shape = (frame.width, frame.height, frame.format.name)
    graph = Graph()
    source = graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base)
    graph.link_nodes(source, graph.add("bwdif", "send_frame:auto:interlaced"), graph.add("buffersink")).configure()
    run = [
        other for other in (before, frame, after) if other and (other.width, other.height, other.format.name) == shape
    ]
    for other in (*run, None):
        graph.vpush(other)
    return [graph.vpull() for _ in run][run.index(frame)]


def to_displayed_rgb(frame: av.VideoFrame, height: int, width: int, reformatter: VideoReformatter) -> np.ndarray:
    """Return the displayed frame, uint8 [height, width, 3] (RGB), converted to RGB before resizing as in processors."""
    turned, right_to_left, upside_down = _turn(frame)
    if turned:
        height, width = width, height
    if frame.color_trc in HDR:
        signal = reformatter.reformat(frame, format="rgb48le").to_ndarray().astype(np.float32)
        signal = np.clip(resize(signal, height, width), 0, 65535).astype(np.uint16)
        pixels = _tone_mapped(signal, frame.color_trc, frame.color_primaries)
    else:
        pixels = resize(reformatter.reformat(frame, format="rgb24").to_ndarray(), height, width)
    if turned:
        pixels = pixels.transpose(1, 0, 2)
    return pixels[:: -1 if upside_down else 1, :: -1 if right_to_left else 1]


def resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize [rows, columns, 3] as in transformers' processors, with torchvision's antialiased bicubic filter."""
    import torch  # lazy: processes that only probe files import this module

    channels = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(channels, (height, width), mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _turn(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False, False, False
    (a, b, _), (c, d, _), _ = np.frombuffer(bytes(matrix), np.int32).reshape(3, 3).tolist()
    turned = abs(b) + abs(c) > abs(a) + abs(d)  # across is a x + c y, down is b x + d y
    across, down, rest = (c, b, (a, d)) if turned else (a, d, (b, c))
    if max(map(abs, rest)) > 0.02 * min(abs(across), abs(down)):  # about a degree
        raise VideoError(
            f"has a rotation of {frame.rotation} degrees or is sheared; supported are multiples of 90, and mirroring",
            "Rotate it, or drop the row",
        )
    return turned, across < 0, down < 0


def _tone_mapped(signal: np.ndarray, curve: int, primaries: int) -> np.ndarray:
    light = _light(curve)[signal]
    if curve == ColorTrc.ARIB_STD_B67:  # scene light; a display adds contrast
        light *= PEAK * (light @ LUMINANCE)[..., None] ** 0.2
    if primaries != ColorPrimaries.BT709:
        light = np.maximum(light @ TO_BT709.T, 0)
    brightest = np.maximum(light.max(axis=-1, keepdims=True), 1e-6)
    light *= _rolled_off(brightest) / brightest
    return np.rint(np.minimum(light, 1) ** (1 / 2.4) * 255).astype(np.uint8)  # a display's gamma, BT.1886


def _rolled_off(light: np.ndarray) -> np.ndarray:
    """Roll off highlights by Moebius' curve: linear up to `KNEE`, smooth from there, 1 at `PEAK`."""
    a = -(KNEE**2) * (PEAK - 1) / (KNEE**2 - 2 * KNEE + PEAK)
    b = (KNEE**2 - 2 * KNEE * PEAK + PEAK) / (PEAK - 1)
    return np.where(light <= KNEE, light, (b + KNEE) ** 2 / (b - a) * (light + a) / (light + b))


@cache
def _light(curve: int) -> np.ndarray:
    """Return luminance by signal value, float32 [65536]: PQ relative to `WHITE`, HLG relative to the peak."""
    signal = np.arange(65536) / 65535
    if curve == ColorTrc.SMPTE2084:
        root = signal ** (1 / 78.84375)
        light = (np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125)
        return (light * 10_000 / WHITE).astype(np.float32)
    bright = (np.exp((signal - 0.55991073) / 0.17883277) + 0.28466892) / 12
    return np.where(signal <= 0.5, signal**2 / 3, bright).astype(np.float32)
