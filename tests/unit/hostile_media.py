"""Twenty malicious clips and images, each written to a folder by `write`."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from clip_files import steady, write_video
from PIL import Image


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _header(width: int, height: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


def _image(form: str, size=(64, 48), **options) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(noise).save(written, form, **options)
    return written.getvalue()


def _clip(folder: Path, kind: str, **options) -> bytes:
    path = Path(write_video(folder / f"source.{kind}", steady(20), size=(56, 56), **options))
    data = path.read_bytes()
    path.unlink()
    return data


def _box(data: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """Replace bytes at this offset in the first box of this name."""
    at = data.index(name) + 4 + offset
    return data[:at] + value + data[at + len(value) :]


def _exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


ROWS = zlib.compress(b"".join(b"\0" + bytes(3 * 64) for _ in range(48)))
GIF = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
FRAME = b"\x21\xf9\x04\x04\xff\xff\0\0\x2c\0\0\0\0\1\0\1\0\0\2\2\x44\1\0"
NAN = b"\x44\x89\x88" + struct.pack(">d", float("nan"))

IMAGES = {
    "a picture of text bombs.png": lambda _: _png(
        _header(64, 48), *[(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20)))] * 60, (b"IDAT", ROWS), (b"IEND", b"")
    ),
    "a profile bomb.png": lambda _: _png(
        _header(64, 48), (b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 26))), (b"IDAT", ROWS), (b"IEND", b"")
    ),
    "animated without end.png": lambda _: _png(
        _header(64, 48), (b"acTL", struct.pack(">II", 2**31 - 1, 0)), (b"IDAT", ROWS), (b"IEND", b"")
    ),
    "more rows than said.png": lambda _: _png(_header(8, 8), (b"IDAT", zlib.compress(bytes(1 << 27))), (b"IEND", b"")),
    "a canvas of billions.webp": lambda _: (
        b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\xff\xff" * 2
    ),
    "tiles.tif": lambda _: (
        b"II*\0\x08\0\0\0\x05\0"
        + b"".join(
            struct.pack("<HHII", *entry)
            for entry in (
                (256, 4, 1, 8000),
                (257, 4, 1, 8000),
                (322, 4, 1, 2**31),
                (323, 4, 1, 2**31),
                (324, 4, 2**29, 8),
            )
        )
    ),
    "turned and turned.jpg": lambda _: _image("JPEG", exif=_exif(77)),
    "a strip on its side.jpg": lambda _: _image("JPEG", (1, 60_000), exif=_exif(6)),
    "a drawing.png": lambda _: (
        b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY e SYSTEM "file:///etc/passwd">]>'
        b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script><text>&e;</text></svg>'
    ),
    "blocks.jp2": lambda _: _image("JPEG2000")[:-40].replace(
        struct.pack(">II", 64, 48), struct.pack(">II", 2**31, 2**31)
    ),
}
CLIPS = {
    "half.mp4": lambda folder: _clip(folder, "mp4")[:-300],
    "a clock that stands.mp4": lambda folder: _box(_clip(folder, "mp4"), b"mdhd", 12, struct.pack(">II", 0, 2**32 - 1)),
    "samples without end.mp4": lambda folder: _box(_clip(folder, "mp4"), b"stsz", 4, struct.pack(">II", 0, 2**31)),
    "pixels without end.mp4": lambda folder: _box(_clip(folder, "mp4"), b"avc1", 24, b"\x7f\xff\x7f\xff"),
    "no length.mkv": lambda folder: (
        (data := _clip(folder, "mkv"))[: (at := data.index(b"\x44\x89\x88"))] + NAN + data[at + len(NAN) :]
    ),
    "no rate.avi": lambda folder: _box(_clip(folder, "avi", codec="mpeg4"), b"avih", 4, bytes(4)),
    "hours of nothing.gif": lambda _: GIF + FRAME * 20_000 + b";",
    "a list.mp4": lambda folder: f"ffconcat version 1.0\nfile '{folder.parent}/outside/secret'\n".encode(),
    "a playlist.m3u8": lambda folder: (
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXT-X-KEY:METHOD=AES-128,URI="
        f'"file://{folder.parent}/outside/secret"\n#EXTINF:1,\nfile://{folder.parent}/outside/secret\n'.encode()
    ),
    "numbers %d.png": lambda folder: b"",
}
MEDIA = {
    **{name: ("images", make) for name, make in IMAGES.items()},
    **{name: ("videos", make) for name, make in CLIPS.items()},
}


def write(folder: Path, name: str) -> None:
    """Write one of them; references to other files point to `../outside/secret`."""
    make = MEDIA[name][1]
    (folder / name).write_bytes(make(folder) or _image("PNG"))
    if "%d" in name:
        for number in range(3):
            os.symlink(folder.parent / "outside" / "secret", folder / name.replace("%d", str(number)))
