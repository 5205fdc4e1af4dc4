"""Read images as clips of one frame, with the pixels of the model's processor.

Pixels are bit-equal to those of transformers' default processor: EXIF rotation, RGB, bicubic, first frame of an
animation. Format and number of pixels are checked before decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from rlfuse.errors import VideoError
from rlfuse.video.display import resize
from rlfuse.video.media_settings import ImageSettings
from rlfuse.video.plan import Geometry, VideoPlan
from rlfuse.video.processor_sampling import PixelBounds

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats that Pillow may decode; others start programs (PostScript) or are rarely tested."""
MAX_PIXELS = 2**26
"""Limit per image, 8192 x 8192: even a small file may contain more, which would need over 1 GiB to decode."""
REPLACE = "Replace the file, or drop the row"


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """Size of an image in pixels, upright."""

    height: int
    width: int


def probe(path: str) -> ImageMetadata:
    """Return an image's size. The whole image is decoded to detect damaged files."""
    image = _opened(path)
    return ImageMetadata(image.height, image.width)


def plan_image(
    facts: ImageMetadata,
    bounds: PixelBounds,
    geometry: Geometry,
    settings: ImageSettings | None = None,
    most_tokens: int | None = None,
) -> VideoPlan:
    """Plan an image at the closest size within `bounds` or `settings`. VideoError if it exceeds `most_tokens`."""
    limit = math.inf if most_tokens is None else most_tokens * geometry.cell**2
    size = (settings or ImageSettings()).picture_size
    height, width = size(facts.height, facts.width, geometry.cell, (bounds.min_pixels, bounds.max_pixels, limit))
    times, tokens = (0.0,) * geometry.temporal_patch, height * width // geometry.cell**2
    if most_tokens is not None and tokens > most_tokens:
        problem = f"has {tokens} visual tokens with the settings of its row; video.max_image_tokens is {most_tokens}"
        raise VideoError(problem, "Correct the settings, or raise video.max_image_tokens")
    return VideoPlan(times, height, width, 1.0, tokens, geometry, timestamps=None, is_image=True)


def read(path: str, plan: VideoPlan) -> np.ndarray:
    """Return the image in the plan's size, uint8 [1, height, width, 3] (RGB)."""
    return resize(np.array(_opened(path)), plan.height, plan.width)[None]


def _opened(path: str) -> Image.Image:
    if not Path(path).exists():
        raise VideoError("does not exist", "Correct the row's path", path)
    try:
        with Image.open(path, formats=FORMATS) as file:
            if file.width * file.height <= MAX_PIXELS:
                return ImageOps.exif_transpose(file).convert("RGB")
            problem = f"has {file.width} x {file.height} pixels; the limit is {MAX_PIXELS:,}"
    except Exception as error:  # decoders may raise anything
        raise VideoError(f"can't be read as an image ({error})", REPLACE, path) from error
    raise VideoError(problem, "Make it smaller, or drop the row", path)
