"""Read images as clips of one frame, with the pixels of the model's own processor.

Pixels equal those of transformers' default processor bit by bit: upright by EXIF, RGB, bicubic, the first picture of an
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
"""What Pillow may decode; others, as PostScript, start programs or are seldom tested."""
MAX_PIXELS = 2**26
"""Of a file, 8192 x 8192: a small file may hold many times as many, which take 1 GiB to decode."""
REPLACE = "Replace the file, or drop the row"


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """What is known of an image before it is shown: pixels, upright."""

    height: int
    width: int


def probe(path: str) -> ImageMetadata:
    """What the image is. All of it is decoded, so that what can't be is found here."""
    image = _opened(path)
    return ImageMetadata(image.height, image.width)


def plan_image(
    facts: ImageMetadata,
    bounds: PixelBounds,
    geometry: Geometry,
    settings: ImageSettings | None = None,
    most_tokens: int | None = None,
) -> VideoPlan:
    """Plan an image nearest to its size within bounds or `settings`. VideoError beyond `most_tokens`."""
    limit = math.inf if most_tokens is None else most_tokens * geometry.cell**2
    size = (settings or ImageSettings()).picture_size
    height, width = size(facts.height, facts.width, geometry.cell, (bounds.min_pixels, bounds.max_pixels, limit))
    times, tokens = (0.0,) * geometry.temporal_patch, height * width // geometry.cell**2
    if most_tokens is not None and tokens > most_tokens:
        problem = f"is {tokens} visual tokens by the settings of its row, and video.max_image_tokens is {most_tokens}"
        raise VideoError(problem, "Correct the settings, or raise video.max_image_tokens")
    return VideoPlan(times, height, width, 1.0, tokens, geometry, timestamps=None, is_image=True)


def read(path: str, plan: VideoPlan) -> np.ndarray:
    """uint8 [1, height, width, 3] (RGB), in the plan's size."""
    return resize(np.array(_opened(path)), plan.height, plan.width)[None]


def _opened(path: str) -> Image.Image:
    if not Path(path).exists():
        raise VideoError("there is no such file", "Correct the row's path", path)
    try:
        with Image.open(path, formats=FORMATS) as file:
            if file.width * file.height <= MAX_PIXELS:
                return ImageOps.exif_transpose(file).convert("RGB")
            problem = f"is {file.width} x {file.height} pixels; at most {MAX_PIXELS:,} are decoded"
    except Exception as error:  # decoders raise anything for a damaged file
        raise VideoError(f"can't be read as an image ({error})", REPLACE, path) from error
    raise VideoError(problem, "Make it smaller, or drop the row", path)
