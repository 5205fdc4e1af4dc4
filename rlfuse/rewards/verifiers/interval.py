"""A stretch of time in a video: the overlap with the true one (temporal IoU).

Read are `3.2 to 5.0`, `[3.2, 5.0]`, `3.2s - 5.0s`, `from 3.2 seconds to 5`, `00:03.2 to 01:05`, `1:02:03-1:02:08`; the
last one in the answer counts. An end before its start, or none of its length, is no interval.
"""

from __future__ import annotations

import re
from typing import Any

from rlfuse.rewards.thoughts import answer_only
from rlfuse.rewards.verifiers.answers import answer_in, bad_truth, not_found, overlapping

_TIME = r"((?:\d{1,6}:){0,2}\d{1,6}(?:\.\d{1,6})?)(?![\d:]|\.\d)"
_UNIT = r"(?:\s?(?:s|sec|secs|seconds?)\b)?"
_DASH = r"(?:to|until|and|,|-|\u2013|\u2014|~)"
_INTERVAL = re.compile(
    rf"\[?\s?(?<![\d.:-]){_TIME}{_UNIT}\s?{_DASH}\s?{_TIME}{_UNIT}\s?\]?",
    re.ASCII | re.IGNORECASE,
)


@answer_only
def score(
    data_source: str,
    solution_str: str,
    ground_truth: str | list[float],
    extra_info: dict[str, Any] | None = None,
    *,
    threshold: float = 0.5,
    whole: bool = False,
) -> dict[str, Any]:
    """Seconds in both over seconds in either; `acc` is 1 from `threshold` on. With `whole` the answer must be the
    interval and nothing else."""
    true = interval_in(ground_truth if isinstance(ground_truth, str) else str(list(ground_truth)), whole=True)
    if true is None:
        raise bad_truth(ground_truth, "an interval as in '3.2 to 5.0' or '[3.2, 5.0]', in seconds or mm:ss")
    answer = answer_in(solution_str)
    given = interval_in(answer, whole) if answer else None
    if given is None:
        return not_found(answer, "interval")
    return overlapping(interval_iou(given, true), threshold, *(f"{a:g} to {b:g}" for a, b in (given, true)))


def interval_in(text: str, whole: bool = False) -> tuple[float, float] | None:
    """Start and end in seconds of the last interval in a text, or of the one that it is as a `whole`; else None."""
    found = [_INTERVAL.fullmatch(text.strip())] if whole else list(_INTERVAL.finditer(text))
    if not found or found[-1] is None:
        return None
    start, end = map(_seconds, found[-1].groups())
    return (start, end) if start < end else None


def interval_iou(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Intersection over union of two intervals, each with start before end."""
    both = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    return min(1.0, both / (one[1] - one[0] + other[1] - other[0] - both))  # rounding may exceed it


def _seconds(clock: str) -> float:
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds
