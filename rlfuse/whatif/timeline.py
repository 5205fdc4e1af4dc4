"""The ideal timeline beside the real one, for Perfetto: the same work without slow machines, and balanced.

Role: `rlfuse whatif RUN_DIR --timeline FILE`. Pure. Each step of the ideal run begins when the real one did, so that
the two stand below each other; every slot is there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlfuse.events import Span
from rlfuse.observe.trace import trace
from rlfuse.whatif.run_operations import CONTROLLER
from rlfuse.whatif.run_slowdown import Analysis

IDEAL = 1_000_000
"""Added to the process numbers of the ideal run."""


def beside(analysis: Analysis, steps: Sequence[tuple[Span, Sequence[Span]]], width: int) -> dict[str, Any]:
    """In the trace event format."""
    real = trace([span for _, inside in steps for span in inside], width)
    ideal = trace(ideal_spans(analysis), width)
    for event in ideal["traceEvents"]:
        event["pid"] += IDEAL
        if event["name"] == "process_name":
            event["args"]["name"] += ", ideal"
        elif event["name"] == "process_sort_index":
            event["args"]["sort_index"] += IDEAL
    return {**real, "traceEvents": real["traceEvents"] + ideal["traceEvents"]}


def ideal_spans(analysis: Analysis) -> list[Span]:
    """The run's work as it would have been: the spans of its operations, earlier and shorter."""
    seconds = analysis.durations.balanced
    ends, longest = analysis.replay.ends(seconds), analysis.replay.step_seconds(seconds)
    began = np.array([step.start for step in analysis.recorded.steps])
    spans = [
        replace(step, end=step.start + float(longest[number])) for number, step in enumerate(analysis.recorded.steps)
    ]
    for piece in analysis.recorded.pieces:
        if piece.kind != CONTROLLER:
            end = began[piece.step] + ends[piece.number]
            spans.append(replace(piece.span, start=float(end - seconds[piece.number]), end=float(end)))
    return spans
