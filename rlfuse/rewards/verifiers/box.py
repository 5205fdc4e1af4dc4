r"""Score a bounding box in an image, `[x1, y1, x2, y2]`, by its IoU with the true box.

The answer is the last box in the last `\boxed{}`, else the first announced one, else the last one. If either answer or
truth has relative coordinates (0 to 1), `size` (width, height) converts them to pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlfuse.rewards.reasoning_tags import answer_only
from rlfuse.rewards.verifiers.answers import (
    answer_in,
    ground_truth_error,
    not_found,
    overlap_result,
    read_from,
    strip_markup,
    verdict,
)

# All quantifiers are bounded and white space is collapsed first, so that searching takes linear time.
_NUMBER = r"([-+]?\d{1,9}(?:\.\d{1,15})?+)"
_NEXT = r"(?:\s?[,;]\s?|\s)"
_CORNERS = r"\s?[\])]\s?(?:[,;]\s?)?(?:to\s|and\s|-\s?)?(?:bottom[- ]right:?\s)?[\[(]\s?"
_BOX = re.compile(
    rf"[\[(>]\s?{_NUMBER}{_NEXT}{_NUMBER}(?:{_NEXT}|{_CORNERS}){_NUMBER}{_NEXT}{_NUMBER}\s?(?:[\])]|</?b?box>|<\|box_end\|>)",
    re.ASCII,
)
_KEYS = (("x1", "xmin", "x_min", "left"), ("y1", "ymin", "y_min", "top"),
         ("x2", "xmax", "x_max", "right"), ("y2", "ymax", "y_max", "bottom"))  # fmt: skip
_KEYED = re.compile(
    rf"(?<!\w)({'|'.join(key for keys in _KEYS for key in keys)})[\"']?\s?[:=]\s?{_NUMBER}(?![\w.])", re.ASCII
)

Box = tuple[float, float, float, float]


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[float],
    extra_info: dict[str, Any] | None = None,
    *,
    threshold: float = 0.5,
    size: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the IoU as the score; `acc` is 1 from `threshold` on.

    `size`, or `extra_info["size"]`: width and height of the image in pixels.
    """
    true = _true_box(ground_truth)
    size = _size(size if size is not None else (extra_info or {}).get("size"))
    answer = answer_in(solution_str)
    given = read_from(answer, box_in) if answer else None
    if given is None:
        return not_found(answer, "box [x1, y1, x2, y2]")
    if _is_relative(given) != _is_relative(true):
        if size is None:
            return verdict(0.0, f"answered {_text(given)}, expected {_text(true)}: one is in pixels, one is relative")
        given, true = (_scaled(box, size) if _is_relative(box) else box for box in (given, true))
    return overlap_result(box_iou(given, true), threshold, _text(given), _text(true))


def box_in(text: str, *, first: bool = False) -> Box | None:
    """Return the last or `first` box in a text with ordered corners, or None."""
    text = " ".join(strip_markup(text).split())
    found = _BOX.findall(text)
    if not found:
        values = {match[1]: match[2] for match in _KEYED.finditer(text)}
        found = [[values[key] for keys in _KEYS for key in keys if key in values]]
    numbers = [float(number) for number in found[0 if first else -1]]
    return _ordered(numbers) if len(numbers) == 4 else None


def box_iou(one: Box, other: Box) -> float:
    """Return the IoU of two boxes (left, top, right, bottom) with positive area."""
    wide = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    high = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return min(1.0, wide * high / (sum(areas) - wide * high))  # rounding may exceed it


def _ordered(numbers: Sequence[float]) -> Box | None:
    left, right = sorted(numbers[::2])
    top, bottom = sorted(numbers[1::2])
    return (left, top, right, bottom) if left < right and top < bottom else None


def _true_box(ground_truth: Any) -> Box:
    if isinstance(ground_truth, str):
        box = box_in(ground_truth)
    else:
        try:
            numbers = [float(number) for number in ground_truth]
        except (TypeError, ValueError):
            numbers = []
        box = _ordered(numbers) if len(numbers) == 4 and all(map(math.isfinite, numbers)) else None
    if box is None:
        raise ground_truth_error(ground_truth, "a box [x1, y1, x2, y2] with positive area")
    return box


def _size(size: Any) -> tuple[float, float] | None:
    if size is None:
        return None
    try:
        width, height = map(float, size)
        valid = 0 < width < math.inf and 0 < height < math.inf
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"size: got {size!r}; it must be (width, height) in pixels")
    return width, height


def _is_relative(box: Box) -> bool:
    return min(box) >= 0 and max(box) <= 1


def _scaled(box: Box, size: tuple[float, float]) -> Box:
    return box[0] * size[0], box[1] * size[1], box[2] * size[0], box[3] * size[1]


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{number:g}" for number in box) + "]"
