"""Build the recorded and ideal timelines for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlfuse.events import Span
from rlfuse.tools.trace import FIRST_SLOT, trace
from rlfuse.tools.whatif.operations import Operations
from rlfuse.tools.whatif.run_operations import CONTROLLER
from rlfuse.tools.whatif.slowdown import Job, Run

IDEAL = 1_000_000  # offset of the process ids of the ideal timeline


def of_run(run: Run, steps: Sequence[tuple[Span, Sequence[Span]]], width: int) -> dict[str, Any]:
    """Return both timelines in the trace event format."""
    real = trace([span for _, inside in steps for span in inside], width)
    return _both(real, trace(_ideal_spans(run), width))


def of_job(job: Job) -> dict[str, Any]:
    """Return both timelines in the trace event format, with a process for each worker."""
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


def _ideal_spans(run: Run) -> list[Span]:
    """Return the spans of the run with balanced durations."""
    seconds, steps = run.balanced, run.recorded.steps
    ends, longest = run.replay.ends(seconds), run.replay.step_seconds(seconds)
    began = np.array([step.start for step in steps])
    spans = [replace(step, end=step.start + float(longest[number])) for number, step in enumerate(steps)]
    for piece in run.recorded.pieces:
        if piece.kind != CONTROLLER:
            end = began[piece.step] + ends[piece.number]
            spans.append(replace(piece.span, start=float(end - seconds[piece.number]), end=float(end)))
    return spans
