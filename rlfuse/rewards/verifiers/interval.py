"""Score a time interval in a video by its IoU with the true interval.

Formats: `3.2 to 5.0`, `[3.2, 5.0]`, `00:03.2 to 01:05`, `00:03.200 --> 00:05.000`, `{"start": 3.2, "end": 5.0}`. The
answer is the last interval in the last box, else the first announced one, else the last one.
"""

from __future__ import annotations

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
    strip_wrapping,
)

# All quantifiers are bounded and white space is collapsed first, so that searching takes linear time.
_TIME = r"((?:\d{1,6}:){0,2}\d{1,6}(?:\.\d{1,6})?)(?![\d:]|\.\d)"
_UNIT = r"(?:\s?(?:s|secs?|seconds?|秒)(?![a-z]))?"
_TO = r"(?:to|till|until|through|and|bis|à|hasta|до|到|至|,|;|-{1,2}>?|\u2013|\u2014|~|→)"
_INTERVAL = re.compile(
    rf"(?<![A-Za-z0-9_.:-])[\[(<]?\s?(?<![A-Za-z0-9_.:-]){_TIME}{_UNIT}[>\])\"']?\s?{_TO}\s?[<\[(\"']?{_TIME}{_UNIT}\s?[>\])]?",
    re.IGNORECASE,
)
_KEYED = re.compile(
    rf"(?<!\w)[\"']?(?:(?P<start>start|begin|from)|end|to)(?:s|ning)?(?:[_ ]?(?:time|seconds|sec|s))?[\"']?"
    rf"(?:\s?[:=]\s?|\s(?:at|is)\s)[\"']?{_TIME}{_UNIT}[\"']?",
    re.IGNORECASE,
)
_COMMA = re.compile(r"(?<=:\d\d),(?=\d{3}(?!\d))")
_MINUTES = re.compile(
    r"(?<![\d.:])(\d{1,4})\s?m(?:in(?:ute)?s?)?\s?(?:and\s)?(\d{1,2}(?:\.\d{1,6})?)(?=\s?s)", re.IGNORECASE
)


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[float] | dict[str, float],
    extra_info: dict[str, Any] | None = None,
    *,
    threshold: float = 0.5,
    whole: bool = False,
) -> dict[str, Any]:
    """Return the IoU as the score; `acc` is 1 from `threshold` on.

    `whole`: the answer must consist of the interval only.
    """
    true = _true_interval(ground_truth)
    answer = answer_in(solution_str)
    given = None
    if answer:
        given = interval_in(strip_wrapping(answer), whole=True) if whole else read_from(answer, interval_in)
    if given is None:
        return not_found(answer, "interval")
    return overlap_result(interval_iou(given, true), threshold, *(f"{a:g} to {b:g}" for a, b in (given, true)))


def interval_in(text: str, *, whole: bool = False, first: bool = False) -> tuple[float, float] | None:
    """Return (start, end) in seconds of the last or `first` interval in a text, or None.

    `whole`: the text must consist of the interval only.
    """
    text = _MINUTES.sub(r"\1:\2", _COMMA.sub(".", " ".join(strip_markup(text).split())))
    starts, ends = (
        [match[2] for match in _KEYED.finditer(text) if bool(match["start"]) is is_start] for is_start in (True, False)
    )
    if starts and ends and (not whole or not _KEYED.sub("", text).strip("{}[](),; ")):
        clocks = (starts[0], ends[0]) if first else (starts[-1], ends[-1])
    else:
        found = [_INTERVAL.fullmatch(text)] if whole else list(_INTERVAL.finditer(text))
        if not found or found[0] is None:
            return None
        clocks = found[0 if first else -1].groups()
    start, end = map(_seconds, clocks)
    return (start, end) if start < end else None


def _true_interval(ground_truth: Any) -> tuple[float, float]:
    try:
        if isinstance(ground_truth, str):
            text = strip_wrapping(ground_truth)
        elif isinstance(ground_truth, dict):
            text = ", ".join(f"{key}: {float(value)}" for key, value in ground_truth.items())
        else:
            text = str([float(time) for time in ground_truth])
    except (TypeError, ValueError):
        text = ""
    true = interval_in(text, whole=True)
    if true is None:
        raise ground_truth_error(ground_truth, "an interval such as '3.2 to 5.0' or '[3.2, 5.0]', in seconds or mm:ss")
    return true


def interval_iou(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the IoU of two intervals, each with start < end."""
    both = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    return min(1.0, both / (one[1] - one[0] + other[1] - other[0] - both))  # rounding may exceed it


def _seconds(clock: str) -> float:
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds
