"""Displayed colours of frames: colour tags of the file, and tone mapping of high dynamic range (HDR)."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, ColorTrc, VideoReformatter

from rlfuse.video.decoding import decode, probe
from rlfuse.video.display import KNEE, PEAK, WHITE, to_displayed_rgb
from rlfuse.video.plan import VideoPlan

WEIGHTS = {1: (0.2126, 0.0722), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}
"""Weights of red and blue in the luma of BT.709, BT.601 and BT.2020, by their code in a file."""


def flat(colour: tuple[float, float, float], matrix: int, full: bool = False, curve: int = 1) -> av.VideoFrame:
    """Return a 10-bit frame of one colour; red, green and blue are signals from 0 to 1."""
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


def displayed_colour(frame: av.VideoFrame) -> np.ndarray:
    """Return the displayed colour (0 to 255) of a frame of one colour."""
    pixels = to_displayed_rgb(frame, 28, 28, VideoReformatter())
    assert pixels.dtype == np.uint8 and np.ptp(pixels, axis=(0, 1)).max() <= 1
    return pixels[14, 14].astype(int)


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", WEIGHTS)
def test_colours_follow_the_tags_of_the_file(matrix, full):
    for colour in ((1, 1, 1), (0, 0, 0), (0.8, 0.2, 0.2), (0.2, 0.8, 0.2), (0.1, 0.3, 0.9)):
        assert np.abs(displayed_colour(flat(colour, matrix, full)) - np.multiply(colour, 255)).max() <= 2


def pq(nits: float) -> float:
    """Return the signal of SMPTE ST 2084 (PQ)."""
    power = (nits / 10_000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def hlg(nits: float) -> float:
    """Return the signal of ARIB STD-B67 (HLG) for a grey on a display of 1000 cd/m2."""
    scene = (nits / 1000) ** (1 / 1.2)
    return (3 * scene) ** 0.5 if scene <= 1 / 12 else 0.17883277 * np.log(12 * scene - 0.28466892) + 0.55991073


@pytest.mark.parametrize(("curve", "signal"), [(ColorTrc.SMPTE2084, pq), (ColorTrc.ARIB_STD_B67, hlg)])
def test_hdr_greys_have_the_brightness_of_standard_video(curve, signal):
    def grey(nits: float) -> int:
        red, green, blue = displayed_colour(flat((signal(nits),) * 3, 9, curve=curve))
        assert max(red, green, blue) - min(red, green, blue) <= 2
        return green

    for nits in (1, 5, 20, KNEE * WHITE):  # BT.1886: the light of a display is the signal to the power of 2.4
        assert grey(nits) == pytest.approx(255 * (nits / WHITE) ** (1 / 2.4), abs=2)
    bright = [grey(nits) for nits in (100, WHITE, 400, 700, WHITE * PEAK)]
    assert bright == sorted(set(bright)) and bright[1] > 210 and bright[-1] >= 254


def test_hdr_colours_keep_their_hue():
    """Check BT.709's red at the brightness of paper white, encoded with BT.2020 primaries."""
    red = np.linalg.inv([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])[:, 0]
    colour = tuple(pq(max(light, 0) * WHITE) for light in red)
    found = displayed_colour(flat(colour, 9, curve=ColorTrc.SMPTE2084))
    assert found[0] > 210 and found[1:].max() < 25


def write_hdr(path: Path, codec: str) -> str:
    """Write three frames of paper white in PQ."""
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10, options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 64, HDR[codec]
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace = ColorPrimaries.BT2020, ColorTrc.SMPTE2084, 9
        for number in range(3):
            frame = flat((pq(WHITE),) * 3, 9, curve=ColorTrc.SMPTE2084).reformat(format=HDR[codec])
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
def test_hdr_files_are_detected_by_their_tags(tmp_path, kind, codec):
    path = write_hdr(tmp_path / f"hdr.{kind}", codec)
    assert probe(path).frames == 3
    assert decode(path, VideoPlan((0.0, 0.2), 28, 28, 10.0, 1)).mean() > 210  # 148 without tone mapping


@pytest.mark.parametrize(
    ("size", "form"),
    [
        ((96, 160), "yuv420p"), ((123, 217), "yuv420p"), ((40, 48), "yuv420p"), ((84, 112), "yuv420p"),
        ((64, 200), "yuv420p"), ((301, 57), "yuv420p"), ((480, 640), "yuv420p"), ((96, 160), "yuv444p"),
        ((97, 161), "yuv444p"), ((96, 160), "yuv422p"), ((96, 160), "yuv420p10le"), ((96, 160), "gray"),
        ((96, 160), "bgr0"),
    ],
)  # fmt: skip
def test_pixels_equal_those_of_the_huggingface_processor(tmp_path, size, form):
    """Check edges between saturated colours, where FFmpeg's combined conversion and scaling differs widely."""
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
