"""Sizes of pictures in whole tokens, nearest to the original within bounds of pixels or tokens. Pure."""

from __future__ import annotations

import math

from rlfuse.errors import VideoError

THINNEST = 200
"""Largest ratio of a picture's sides."""


def within(
    height: int, width: int, cell: int, min_pixels: int, max_pixels: int, frames: int = 1, unit: int = 1
) -> tuple[int, int]:
    """Return the multiple of `cell` nearest to the size and within the bounds (`smart_resize`)."""
    if max(height, width) > THINNEST * min(height, width):
        problem = f"is {width} x {height} pixels; the longer side may be {THINNEST} times the shorter at most"
        raise VideoError(problem, "Crop it, or drop the row")
    rows, columns, counted = round(height / cell), round(width / cell), round(frames / unit) * unit
    if counted * rows * columns * cell**2 > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
    elif counted * rows * columns * cell**2 < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
    return rows * cell, columns * cell


def fit_size(height: int, width: int, level: int, cell: int) -> tuple[int, int]:
    """Return the size nearest in shape, in multiples of `cell`, of at most `level` cells, without enlarging."""
    scale = min(1.0, math.sqrt(level * cell * cell / (height * width)))
    down, across = height * scale / cell, width * scale / cell

    def unlike(cells: tuple[int, int]) -> tuple[float, int]:
        rows, columns = cells
        return round(abs(math.log(columns / rows * height / width)), 9), -rows * columns

    rows, columns = min(
        (
            (rows, columns)
            for rows in _neighbours(min(down, level))
            for columns in _neighbours(min(across, level // rows))
            if rows * columns <= level
        ),
        key=unlike,
    )
    return rows * cell, columns * cell


def _neighbours(number: float) -> set[int]:
    return {max(1, math.floor(number)), max(1, math.ceil(number))}
