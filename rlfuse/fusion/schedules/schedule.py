"""Schedules with their times, and an independent check of a schedule against its problem."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlfuse.fusion.schedules.operations import Kind, Operation, Rows, shared_head
from rlfuse.fusion.schedules.problem import Problem, ScheduleError

TOLERANCE = 1e-6  # relative tolerance of times and memory, whose sums are rounded
SHOWN = 6


class Timed(NamedTuple):
    """An operation with its times, in the problem's unit."""

    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A schedule with its times and quality."""

    rows: tuple[tuple[Timed, ...], ...]  # device -> its operations, in order
    lower_bound: float  # no schedule of the problem is shorter
    serial_1f1b: float  # makespan of serial 1F1B with a barrier between models
    memory_peak: float  # maximum over devices, relative to that of serial 1F1B
    method: str  # method that found it
    seconds: float = 0.0  # duration of the search

    @property
    def makespan(self) -> float:
        return max(row[-1].end for row in self.rows if row)

    @property
    def operations(self) -> Rows:
        return tuple(tuple(timed.operation for timed in row) for row in self.rows)


def timed(
    problem: Problem, rows: Rows, duration: Callable[[Operation], float] | None = None
) -> tuple[tuple[Timed, ...], ...]:
    """Return the earliest times of rows, each run in its order.

    `duration`: e.g. measured durations, instead of those of the problem. It must give the durations of shared heads,
    which are not part of the problem and start when all devices have reached them. Raises ScheduleError for a deadlock,
    naming the operations that wait for each other, and for operations that are not part of the problem.
    """
    lengths = _lengths(problem)
    duration = duration or (lambda each: lengths[_class_of(each)])
    where = {each: device for device, row in enumerate(rows) for each in row}
    if unknown := {each for each in where if each.kind != "H"} - expected(problem).keys():
        raise ScheduleError(f"not part of the problem: {_joined([show(each) for each in sorted(unknown)])}")
    ends: dict[Operation, float] = {}
    result: list[list[Timed]] = [[] for _ in rows]
    for began in walk(rows, lambda each: needs(problem, each)):
        start = max((result[device][-1].end for device in began if result[device]), default=0.0)
        for device, each in began.items():
            need = needs(problem, each) if each.kind != "H" else None
            if need is not None:
                start = max(start, ends[need] + (problem.communication if where[need] != device else 0.0))
            ends[each] = start + duration(each)
            result[device].append(Timed(each, start, ends[each]))
    stuck = [row[len(done)] for row, done in zip(rows, result, strict=True) if len(done) < len(row)]
    if stuck:
        raise ScheduleError(f"deadlock: {_joined([_waits(problem, each) for each in stuck])}")
    return tuple(tuple(row) for row in result)


def walk(rows: Rows, need: Callable[[Operation], Operation | None]) -> Iterator[dict[int, Operation]]:
    """Yield operations as they start, each after the one that it needs, until all rows are done or stuck.

    Each item maps device -> operation: of one device, or of all devices that compute a head jointly.
    """
    members, met = head_sizes(rows), defaultdict[Operation, set[int]](set)
    done, waiting = set[Operation](), dict[Operation, int]()
    reached, runnable = [0] * len(rows), list(range(len(rows)))
    while runnable:
        device = runnable.pop()
        while reached[device] < len(rows[device]):
            each = rows[device][reached[device]]
            came = {device}
            if each.kind == "H":
                came = met[shared_head(each)]
                came.add(device)
                if len(came) < members[shared_head(each)]:
                    break
                runnable += came - {device}
            elif (before := need(each)) is not None and before not in done:
                waiting[before] = device
                break
            yield {other: rows[other][reached[other]] for other in came}
            for other in came:
                reached[other] += 1
            done.add(each)
            if each in waiting:
                runnable.append(waiting.pop(each))


def head_sizes(rows: Rows) -> Counter[Operation]:
    """Return shared head -> number of devices that compute it."""
    return Counter(shared_head(each) for row in rows for each in row if each.kind == "H")


def needs(problem: Problem, each: Operation) -> Operation | None:
    """Return the operation whose result it needs; None for the first forward.

    F needs the forward of the previous stage. B needs the backward of the next stage, or the forward of the last
    stage. W needs its B.
    """
    model, pipeline, stage, micro_batch, kind = each
    if kind == "F":
        return Operation(model, pipeline, stage - 1, micro_batch, "F") if stage else None
    if kind == "W":
        return Operation(model, pipeline, stage, micro_batch, "B")
    if stage == problem.stages(problem.model(model)) - 1:
        return Operation(model, pipeline, stage, micro_batch, "F")
    return Operation(model, pipeline, stage + 1, micro_batch, "B")


def show(each: Operation) -> str:
    """Format an operation for messages."""
    return f"{each.kind} of {each.model}[{each.pipeline}] stage {each.stage} micro-batch {each.micro_batch}"


def _waits(problem: Problem, each: Operation) -> str:
    need = needs(problem, each) if each.kind != "H" else None
    return f"{show(each)} waits for {show(need)}" if need else show(each)


def _joined(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return "; ".join(parts[:SHOWN]) + more


def _class_of(each: Operation) -> tuple[str, int, int, Kind]:
    return each.model, each.pipeline, each.stage, each.kind


def _lengths(problem: Problem) -> dict[tuple[str, int, int, Kind], float]:
    return {
        (model.name, pipeline, stage, kind): problem.duration(model, pipeline, stage, kind)
        for model in problem.models
        for pipeline in range(model.pipelines)
        for stage in range(problem.stages(model))
        for kind in problem.kinds(model)
    }


def expected(problem: Problem) -> dict[Operation, int]:
    """Return every operation of a problem -> its device."""
    return {
        Operation(model.name, pipeline, stage, micro_batch, kind): device
        for model in problem.models
        for pipeline in range(model.pipelines)
        for stage in range(problem.stages(model))
        for device in [problem.device(model, pipeline, stage)]
        for micro_batch in range(model.micro_batches)
        for kind in problem.kinds(model)
    }


def check(problem: Problem, schedule: Schedule) -> None:
    """Raise ScheduleError for missing operations, wrong durations, early starts, overlaps or too much memory."""
    _check_complete(problem, schedule)
    slack, lengths = TOLERANCE * schedule.makespan, _lengths(problem)
    placed = {timed.operation: (timed.end, device) for device, row in enumerate(schedule.rows) for timed in row}
    for each, start, end in itertools.chain.from_iterable(schedule.rows):
        length = lengths[_class_of(each)]
        if abs(end - start - length) > slack:
            raise ScheduleError(f"{show(each)} takes {end - start:g}, but {length:g} in the problem")
        need = needs(problem, each)
        if need is not None:
            before, source = placed[need]
            ready = before + (problem.communication if source != placed[each][1] else 0.0)
            if start < ready - slack:
                raise ScheduleError(f"{show(each)} starts at {start:g}, before the result of {show(need)} at {ready:g}")
        elif start < -slack:
            raise ScheduleError(f"{show(each)} starts at {start:g}: must be at least 0")
    for device, row in enumerate(schedule.rows):
        for first, second in itertools.pairwise(row):
            if second.start < first.end - slack:
                raise ScheduleError(
                    f"device {device}: {show(second.operation)} starts at {second.start:g}, while "
                    f"{show(first.operation)} runs until {first.end:g}"
                )
    held, limit = max(peaks(problem, schedule.rows)), problem.memory_limit
    if held > limit * (1 + TOLERANCE):
        raise ScheduleError(f"memory: a device holds {held:g}, but the limit is {limit:g}")


def _check_complete(problem: Problem, schedule: Schedule) -> None:
    if len(schedule.rows) != problem.devices:
        raise ScheduleError(
            f"schedule has {len(schedule.rows)} rows for devices={problem.devices}: give one per device"
        )
    missing = expected(problem)
    for device, row in enumerate(schedule.rows):
        for timed in row:
            place = missing.pop(timed.operation, None)
            if place is None:
                raise ScheduleError(f"{show(timed.operation)} is scheduled twice, or not part of the problem")
            if place != device:
                raise ScheduleError(f"{show(timed.operation)} is in row {device}, but its stage is on device {place}")
    if missing:
        raise ScheduleError(f"schedule lacks {len(missing)} operations: {_joined([show(each) for each in missing])}")


def peaks(problem: Problem, rows: tuple[tuple[Timed, ...], ...]) -> list[float]:
    """Return device -> peak activation memory, held from the start of a forward to the end of its last backward."""
    releasing, sizes = "W" if problem.split_backward else "B", _sizes(problem)
    most = []
    for row in rows:
        highest = held = 0.0
        events = []
        for operation, start, end in row:
            if operation.kind == "F":
                events.append((start, 1, sizes[operation.model, operation.stage]))
            elif operation.kind == releasing:
                events.append((end, 0, -sizes[operation.model, operation.stage]))
        for _, _, change in sorted(events):
            held += change
            highest = max(highest, held)
        most.append(highest)
    return most


def _sizes(problem: Problem) -> dict[tuple[str, int], float]:
    return {
        (model.name, stage): problem.activation(model, stage)
        for model in problem.models
        for stage in range(problem.stages(model))
    }
