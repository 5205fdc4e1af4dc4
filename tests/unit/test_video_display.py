"""What a screen would show of a frame: colours whatever the file's tags."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, ColorTrc, VideoReformatter

from rlfuse.errors import VideoError
from rlfuse.video.decoding import decode, probe
from rlfuse.video.display import shown
from rlfuse.video.plan import VideoPlan

WEIGHTS = {1: (0.2126, 0.0722), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}
"""Of red and blue in BT.709's, BT.601's and BT.2020's brightness, by their number in a file."""


def flat(colour: tuple[float, float, float], matrix: int, full: bool = False, curve: int = 1) -> av.VideoFrame:
    """10-bit, of one colour: red, green and blue as signals from 0 to 1."""
    red, blue = WEIGHTS[matrix]
    y = float(np.dot(colour, (red, 1 - red - blue, blue)))
    planes = [y, (colour[2] - y) / (2 - 2 * blue) + 0.5, (colour[0] - y) / (2 - 2 * red) + 0.5]
    limited = [64 + 876 * planes[0], *(64 + 896 * chroma for chroma in planes[1:])]
    frame = av.VideoFrame(64, 64, "yuv444p10le")
    for plane, signal, code in zip(frame.planes, planes, limited, strict=True):
        plane.update(np.full(plane.buffer_size // 2, round(1023 * signal if full else code), np.uint16).tobytes())
    frame.colorspace, frame.color_trc = matrix, curve
    frame.color_range = ColorRange.JPEG if full else ColorRange.MPEG
    frame.color_primaries = ColorPrimaries.BT2020 if matrix == 9 else ColorPrimaries.BT709
    return frame


def seen(frame: av.VideoFrame) -> np.ndarray:
    """Its colour, 0 to 255."""
    pixels = shown(frame, 28, 28, VideoReformatter())
    assert pixels.dtype == np.uint8 and np.ptp(pixels, axis=(0, 1)).max() <= 1
    return pixels[14, 14].astype(int)


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", WEIGHTS)
def test_colours_are_those_of_the_file_s_tags(matrix, full):
    for colour in ((1, 1, 1), (0, 0, 0), (0.8, 0.2, 0.2), (0.2, 0.8, 0.2), (0.1, 0.3, 0.9)):
        assert np.abs(seen(flat(colour, matrix, full)) - np.multiply(colour, 255)).max() <= 2


def write_hdr(path: Path, codec: str) -> str:
    """Three grey frames in PQ."""
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10, options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 64, HDR[codec]
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace = ColorPrimaries.BT2020, ColorTrc.SMPTE2084, 9
        for number in range(3):
            frame = flat((0.58,) * 3, 9, curve=ColorTrc.SMPTE2084).reformat(format=HDR[codec])
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return str(path)


HDR = {
    "libx264": "yuv444p10le",
    "libx265": "yuv420p10le",
    "libsvtav1": "yuv420p10le",
    "prores_ks": "yuv422p10le",
    "ffv1": "yuv420p10le",
}


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        *(("mkv", codec) for codec in HDR),
        *(("mp4", codec) for codec in ("libx264", "libx265", "libsvtav1")),
        ("mov", "prores_ks"),
        ("ts", "libx265"),
        ("webm", "libsvtav1"),
    ],
)
def test_hdr_files_are_refused_by_their_tags(tmp_path, kind, codec):
    with pytest.raises(VideoError, match=r"has a high dynamic range \(PQ or HLG\)\. Tone-map it"):
        probe(write_hdr(tmp_path / f"hdr.{kind}", codec))


@pytest.mark.parametrize(
    ("size", "form"),
    [
        ((96, 160), "yuv420p"), ((123, 217), "yuv420p"), ((40, 48), "yuv420p"), ((84, 112), "yuv420p"),
        ((64, 200), "yuv420p"), ((301, 57), "yuv420p"), ((480, 640), "yuv420p"), ((96, 160), "yuv444p"),
        ((97, 161), "yuv444p"), ((96, 160), "yuv422p"), ((96, 160), "yuv420p10le"), ((96, 160), "gray"),
        ((96, 160), "bgr0"),
    ],
)  # fmt: skip
def test_pixels_of_clips_are_the_processors(tmp_path, size, form):
    """Edges between saturated colours, which FFmpeg's conversion in one call with scaling misses widely."""
    from transformers import Qwen2VLVideoProcessor

    picture = np.random.default_rng(0).integers(0, 2, (-(-size[0] // 8), -(-size[1] // 8), 3)).repeat(8, 0).repeat(8, 1)
    path = str(tmp_path / "clip.mkv")
    with av.open(path, "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.height, stream.width, stream.pix_fmt = *size, form
        for number in range(2):
            pixels = (255 * np.roll(picture, number, axis=1)[: size[0], : size[1]]).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format=form)
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with av.open(path) as container:
        native = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    processor = Qwen2VLVideoProcessor(min_pixels=56 * 84, max_pixels=84 * 112)
    videos = torch.tensor(native).permute(0, 3, 1, 2)[None]
    theirs = processor.resize(videos, processor.size, processor.resample, factor=28)[0].permute(0, 2, 3, 1)
    ours = decode(path, VideoPlan((0.0, 0.1), *theirs.shape[1:3], 10.0, 16))
    np.testing.assert_array_equal(ours, theirs)
