"""Write the ideal timeline next to the recorded one, for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlfuse.events import Span
from rlfuse.tools.trace import FIRST_SLOT, trace
from rlfuse.tools.whatif.operations import Operations
from rlfuse.tools.whatif.run_operations import CONTROLLER
from rlfuse.tools.whatif.run_slowdown import Analysis
from rlfuse.tools.whatif.slowdown import Job

IDEAL = 1_000_000  # added to the process numbers of the ideal run


def of_run(analysis: Analysis, steps: Sequence[tuple[Span, Sequence[Span]]], width: int) -> dict[str, Any]:
    """Return both in the trace event format."""
    real = trace([span for _, inside in steps for span in inside], width)
    return _both(real, trace(ideal_spans(analysis), width))


def of_job(job: Job) -> dict[str, Any]:
    """Return both in the trace event format, a process for each worker."""
    operations, ends = job.operations, job.replay.ends(job.ideal)
    begins = np.full(operations.steps, np.inf)
    np.minimum.at(begins, operations.step, operations.start)
    ends += begins[operations.step]
    both = [trace(_worker_spans(operations, *times))
            for times in ((operations.start, operations.end), (ends - job.ideal, ends))]  # fmt: skip
    for event in (event for each in both for event in each["traceEvents"] if event["name"] == "process_name"):
        stage, rank = divmod(event["pid"] - FIRST_SLOT, operations.ranks)
        event["args"]["name"] = f"stage {stage}, data rank {rank}"
    return _both(*both)


def _worker_spans(operations: Operations, start: np.ndarray, end: np.ndarray) -> list[Span]:
    worker = operations.stage * operations.ranks + operations.rank
    rows = zip(operations.kind, worker, start, end, operations.step, strict=True)
    return [
        Span(operations.kinds[kind], f"trainer/{at}", float(begin), float(until), int(step))
        for kind, at, begin, until, step in rows
    ]


def _both(recorded: dict[str, Any], ideal: dict[str, Any]) -> dict[str, Any]:
    for event in ideal["traceEvents"]:
        event["pid"] += IDEAL
        if event["name"] == "process_name":
            event["args"]["name"] += ", ideal"
        elif event["name"] == "process_sort_index":
            event["args"]["sort_index"] += IDEAL
    return {**recorded, "traceEvents": recorded["traceEvents"] + ideal["traceEvents"]}


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
