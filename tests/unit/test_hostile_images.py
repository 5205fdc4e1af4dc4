"""Hostile images from third-party data sets: each gives an error for its row before it is decoded."""

import io
import resource
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from rlfuse.errors import VideoError
from rlfuse.video.images import probe


def picture(mode="RGB"):
    noise = np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8)
    return Image.fromarray(noise).convert(mode)


def encoded(image, form):
    written = io.BytesIO()
    image.save(written, form)
    return written.getvalue()


def png_of(width, height, data=b"", depth=8, colour=0):
    """Return a PNG with arbitrary header fields."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)),
        (b"IDAT", data),
        (b"IEND", b""),
    ]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) (w) file\n%%EOF\n"
PICTURES = {form: encoded(picture(), form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")}
HOSTILE = {
    "PostScript": POSTSCRIPT,
    "PostScript in a DOS wrapper": struct.pack("<4sIIIIIIH", b"\xc5\xd0\xd3\xc6", 30, len(POSTSCRIPT), *[0] * 5)
    + POSTSCRIPT,
    "PDF": b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n",
    "ICNS": encoded(picture(), "ICNS"),
    "PCX": encoded(picture(), "PCX"),
    "SPIDER": encoded(picture("F"), "SPIDER"),
    "TGA": encoded(picture(), "TGA"),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "a PNG above Pillow's own limit": png_of(60_000, 60_000),
    "a PNG of the largest size": png_of(2**31 - 1, 2**31 - 1),
    "a PNG without pixels": png_of(0, 0),
    "a long strip": png_of(2**26 + 1, 1, zlib.compress(bytes(2**20))),
    "a PPM of any size": b"P6 100000 100000 255\n",
    "a PPM of a long number": b"P6 " + b"9" * 5000 + b" 1 255\n",
    "a BMP of any size": PICTURES["BMP"][:18] + struct.pack("<ii", 10**5, 10**5) + PICTURES["BMP"][26:],
    "a GIF of any size": PICTURES["GIF"][:6] + b"\xff\xff\xff\xff" + PICTURES["GIF"][10:],
    "nothing": b"",
    "zeros": bytes(1000),
    **{f"half a {form}": content[: len(content) // 2] for form, content in PICTURES.items()},
    **{f"the head of a {form}": content[:30] for form, content in PICTURES.items()},
    "a TIFF whose directory is itself": b"II*\0\x08\0\0\0\x01\0\0\x01\x04\0\xff\xff\xff\xff\x08\0\0\0\x08\0\0\0",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_images_are_rejected_before_decoding(tmp_path, content, monkeypatch):
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("PostScript was run"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(VideoError, match=r"photo\.png"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB"


@pytest.mark.slow
def test_decompression_bombs_use_no_memory(tmp_path):
    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(13_301)) for _ in range(13_300)) + packer.flush()
    (tmp_path / "a.png").write_bytes(png_of(13_300, 13_300, rows))
    assert (tmp_path / "a.png").stat().st_size < 10**6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(VideoError, match="has 13300 x 13300 pixels; the limit is 67,108,864"):
        probe(str(tmp_path / "a.png"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024, "KiB"


@pytest.mark.parametrize(
    "error", [KeyError("x"), IndexError(), struct.error("x"), zlib.error("x"), MemoryError(), TypeError()]
)
def test_any_decoder_exception_becomes_an_error_of_the_row(tmp_path, error, monkeypatch):
    def broken(*_):
        raise error

    (tmp_path / "a.png").write_bytes(PICTURES["PNG"])
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", broken)
    with pytest.raises(VideoError, match="can't be read as an image"):
        probe(str(tmp_path / "a.png"))


def test_common_formats_are_read_up_to_the_pixel_limit(tmp_path, monkeypatch):
    for form, content in PICTURES.items():
        (tmp_path / form).write_bytes(content)
        assert (probe(str(tmp_path / form)).height, probe(str(tmp_path / form)).width) == (64, 48), form
    monkeypatch.setattr("rlfuse.video.images.MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(VideoError, match="has 48 x 64 pixels; the limit is 3,071"):
        probe(str(tmp_path / "PNG"))
