"""Convert a decoded frame to what a screen shows: resized, upright. Interlaced and HDR frames are refused."""

from __future__ import annotations

import av
import numpy as np
from av.video.reformatter import ColorTrc, VideoReformatter

from rlfuse.errors import VideoError

HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)


def check(frame: av.VideoFrame) -> None:
    """VideoError for a frame of two instants, or of more brightness than RGB has: no processor converts them alike."""
    if frame.interlaced_frame:
        raise VideoError("is interlaced", "Deinterlace it (ffmpeg -vf bwdif), or drop the row")
    if frame.color_trc in HDR:
        raise VideoError("has a high dynamic range (PQ or HLG)", "Tone-map it (ffmpeg -vf libplacebo), or drop the row")


def sides(frame: av.VideoFrame, aspect: float) -> tuple[int, int]:
    """Height and width as displayed, with pixels `aspect` times as wide as high made square."""
    height, width = frame.height, max(1, round(frame.width * aspect))
    return (width, height) if _turn(frame)[0] else (height, width)


def shown(frame: av.VideoFrame, height: int, width: int, reformatter: VideoReformatter) -> np.ndarray:
    """Return the frame as displayed, uint8 [height, width, 3] (RGB), converted before resizing, as processors do."""
    turned, right_to_left, upside_down = _turn(frame)
    if turned:
        height, width = width, height
    pixels = resize(reformatter.reformat(frame, format="rgb24").to_ndarray(), height, width)
    if turned:
        pixels = pixels.transpose(1, 0, 2)
    return pixels[:: -1 if upside_down else 1, :: -1 if right_to_left else 1]


def resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize [rows, columns, 3] as transformers' processors do: with torchvision's antialiased bicubic filter."""
    import torch  # not above: processes that only probe files import this file, too

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
            f"is to be shown turned by {frame.rotation} degrees or askew; valid are multiples of 90, mirrored or not",
            "Rotate it, or drop the row",
        )
    return turned, across < 0, down < 0
