"""`rlfuse trace`: export a run in Chrome's Trace Event Format for ui.perfetto.dev.

The trace has a process per slot, one for rewards and one for the driver. Arrows follow each sample from generation to
the optimizer step. Slices of a track never overlap; every point of an arrow is inside a slice, forwards in time.
"""

from __future__ import annotations

import argparse
import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfuse.events import Span
from rlfuse.files import atomic_write
from rlfuse.run_folder.reader import RunError, RunFolder, open_run, reading

STEPS = 50
"""Default number of steps: each has a few hundred events, and viewers slow down beyond a million."""
NAMED_SAMPLES = 8
DRIVER, REWARDS, FIRST_SLOT = 1, 2, 10
Event = dict[str, Any]


@dataclass(slots=True)
class Slice:
    """Span with its position in the trace."""

    span: Span
    pid: int
    tid: int
    start: int
    end: int
    """At least one after `start`, as slices without length are invisible and can't have arrows."""

    def event(self) -> Event:
        span, shown = self.span, self.span.samples[:NAMED_SAMPLES]
        args: dict[str, Any] = {"step": span.step, "cause": span.cause, "tokens": span.tokens, **span.attributes}
        if span.samples:
            more = f" and {len(span.samples) - len(shown)} more" if len(span.samples) > len(shown) else ""
            args["samples"] = ", ".join(shown) + more
        place = {"pid": self.pid, "tid": self.tid}
        return {"ph": "X", "name": span.kind, "cat": span.kind, "ts": self.start, "dur": self.end - self.start} | (
            place | {"args": args}
        )


def trace(spans: Sequence[Span], width: int = 1) -> dict[str, Any]:
    """Return the trace of these spans. `width`: slots per rollout engine, which is shown on the first of them."""
    zero = min((span.start for span in spans), default=0.0)
    slices, tracks = _laid_out(spans, zero, width)
    events = [each.event() for each in slices] + list(_counters(slices)) + list(_flows(slices))
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": list(_names(tracks)) + events, "displayTimeUnit": "ms"}


def _place(span: Span, width: int) -> tuple[int, str]:
    process, _, number = span.where.partition("/")
    if process == "reward":
        return REWARDS, span.where
    if process not in ("rollout", "trainer", "encoder") or not number:
        return DRIVER, span.kind
    pid = FIRST_SLOT + int(number) * (width if process == "rollout" else 1)
    return pid, "samples" if span.kind == "generate" else {"rollout": "engine", "trainer": "rank"}.get(process, process)


def _laid_out(spans: Iterable[Span], zero: float, width: int) -> tuple[list[Slice], dict[tuple[int, int], str]]:
    """Assign spans to lanes without overlap. Return slices, and lane names by process and thread number."""
    by_track: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_track[_place(span, width)].append(span)
    slices: list[Slice] = []
    names: dict[tuple[int, int], str] = {}
    numbers: dict[int, int] = defaultdict(int)
    for (pid, track), own in by_track.items():
        first, ends = numbers[pid] + 1, []
        for span in sorted(own, key=lambda span: (span.start, -span.end)):
            start, end = round((span.start - zero) * 1e6), round((span.end - zero) * 1e6)
            lane = next((lane for lane, until in enumerate(ends) if until <= start), len(ends))
            ends[lane : lane + 1] = [max(end, start + 1)]
            slices.append(Slice(span, pid, first + lane, start, ends[lane]))
        numbers[pid] += len(ends)
        names |= {(pid, first + lane): f"{track} {lane + 1}" if len(ends) > 1 else track for lane in range(len(ends))}
    return slices, names


def _names(tracks: dict[tuple[int, int], str]) -> Iterator[Event]:
    for pid in sorted({pid for pid, _ in tracks}):
        name = {DRIVER: "driver", REWARDS: "rewards"}.get(pid, f"slot {pid - FIRST_SLOT}")
        yield _meta("process_name", pid, 0, name=name)
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    for (pid, tid), name in tracks.items():
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _counters(slices: Iterable[Slice]) -> Iterator[Event]:
    decoding: dict[int, list[Slice]] = defaultdict(list)
    came: dict[int, list[int]] = defaultdict(list)
    went: dict[int, list[int]] = defaultdict(list)
    for each in slices:
        if each.span.kind == "decode":
            decoding[each.pid].append(each)
        elif each.span.kind == "generate":
            came[each.pid].append(each.start)
            went[each.pid].append(each.end)
    for pid, own in decoding.items():
        own.sort(key=lambda each: each.start)
        arrived, left = sorted(came[pid]), sorted(went[pid])

        def waiting(now: int, running: int, arrived: list[int] = arrived, left: list[int] = left) -> int:
            return max(0, bisect_right(arrived, now) - bisect_right(left, now) - running)

        for number, each in enumerate(own):
            running, held = each.span.attributes["batch"], each.span.attributes["context"]
            yield _counter(pid, each.start, "samples", running=running, waiting=waiting(each.start, running))
            yield _counter(pid, each.start, "KV cache", tokens=held)
            if number + 1 == len(own) or own[number + 1].start > each.end:
                yield _counter(pid, each.end, "samples", running=0, waiting=waiting(each.end, 0))
                yield _counter(pid, each.end, "KV cache", tokens=0)


def _counter(pid: int, ts: int, name: str, **values: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": values}


def _flows(slices: Iterable[Slice]) -> Iterator[Event]:
    last: dict[tuple[str, str], Slice] = {}
    learned: dict[tuple[str, str, int], list[Slice]] = {}
    steps: dict[tuple[int, str], list[Slice]] = defaultdict(list)
    for each in sorted(slices, key=lambda each: each.start):
        span, model = each.span, each.span.attributes.get("model", "")
        if span.kind == "optimizer":
            steps[each.pid, model].append(each)
        for sample in span.samples if span.where != "driver" else ():
            if span.kind in ("generate", "reward"):
                last[sample, span.kind] = each  # its last engine, if it moved
            elif span.kind == "backward" and model:
                origin = [last[sample, kind] for kind in ("generate", "reward") if (sample, kind) in last]
                begun = origin[0].start if origin else 0  # separates a step that ran again after a resume
                learned.setdefault((sample, model, begun), [*origin, each])
    for number, ((sample, model, _), stations) in enumerate(learned.items(), 1):
        batch = stations[-1]
        after = [step for step in steps[batch.pid, model] if step.start >= batch.start][:1]
        yield from _arrow(number, f"{sample} to {model}", stations + after)


def _arrow(number: int, name: str, stations: Sequence[Slice]) -> Iterator[Event]:
    """Yield an arrow from the end of the first slice through the starts of the others, in order of time."""
    if len(stations) < 2:
        return
    for place, each in enumerate(stations):
        last = place == len(stations) - 1
        ts = min(each.end - 1, stations[1].start) if place == 0 else each.start
        common = {"name": "sample", "cat": "sample", "id": number, "pid": each.pid, "tid": each.tid, "ts": ts}
        kind = {"ph": "s"} if place == 0 else {"ph": "f", "bp": "e"} if last else {"ph": "t"}
        yield kind | common | {"args": {"sample": name}}


def main(argv: Sequence[str]) -> None:
    """Run `rlfuse trace RUN_DIR`. Raises RunError."""
    parser = argparse.ArgumentParser(
        prog="rlfuse trace", description="Export a run for ui.perfetto.dev or chrome://tracing."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/trace.json.gz; plain without .gz")
    parser.add_argument("--steps", metavar="A-B", help=f"steps to export; default: the last {STEPS}")
    arguments = parser.parse_args(argv)
    run = open_run(arguments.run)
    with reading(run.path):
        spans, described = _chosen(run, arguments.steps)
        text = json.dumps(trace(spans, run.width), separators=(",", ":"))
    out = arguments.out or run.path / "trace.json.gz"
    with atomic_write(out) as aside, gzip.open(aside, "wt") if out.suffix == ".gz" else aside.open("w") as file:
        file.write(text)
    print(f"{described}: {len(spans):,} events in {out}; open it at https://ui.perfetto.dev")


def _chosen(run: RunFolder, wanted: str | None) -> tuple[list[Span], str]:
    steps = run.steps()
    if not steps:
        return list(run.spans()), "no complete step; all events"
    first, last = (max(steps) - STEPS + 1, max(steps)) if wanted is None else _range(wanted)
    chosen = {number: span for number, span in steps.items() if first <= number <= last}
    if not chosen:
        raise RunError(f"--steps {wanted}: the run has steps {min(steps)} to {max(steps)}")
    start = min(span.start for span in chosen.values()) if min(chosen) > min(steps) else float("-inf")
    end = max(span.end for span in chosen.values()) if max(chosen) < max(steps) else float("inf")
    spans = [span for span in run.spans() if span.start >= start and span.end <= end]
    return spans, f"steps {min(chosen)} to {max(chosen)}"


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise RunError(f"--steps {text}: must be a step or a range, such as 7 or 5-9") from None
