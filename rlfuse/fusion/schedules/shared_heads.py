"""Insert the vocabulary-parallel heads that all devices of a pipeline compute together (arXiv 2411.05288).

    last stage          F0 | H0 B0 F1 | H1 B1 F2 | ...     | : all devices of the pipeline meet
    stage before  F0 F1 F2 | H0       | H1 B0 F3 | ...     H: a share of the logits, of softmax and of its gradients

No deadlock: `with_heads` plays the schedule and records operations as they begin, so every device's row is part of one
common order in which each operation comes after its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from rlfuse.fusion.schedules.operations import Kind, Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.schedule import needs, peaks, show, timed

IN_FLIGHT = ((1.0, 1), (1.0, 2), (1.5, 1))
"""How many micro-batches more each stage before has, and those of the last stage; of 1F1B 1 and 1. With 1.5, what a
forward takes to the next stage but one, and a backward to the next, is the time between two heads."""
Heads = Mapping[str, float]  # model -> how long its devices take for the head of a micro-batch together


def best(problem: Problem, found: Rows, heads: Heads) -> Rows:
    """`found`, or 1F1B of one model after the other, with heads: the shortest that memory has room for."""
    options: list[tuple[float, int, Rows]] = []
    for rows, patient in product((found, *_more_in_flight(problem)), (False, True)):
        whole = with_heads(problem, rows, heads, patient)
        times = timed(problem, whole, duration(problem, heads))
        held = max(peaks(problem, times)) if options else 0.0
        if held <= problem.memory_limit * (1 + 1e-6):
            options.append((max(row[-1].end for row in times), len(options), whole))
    return min(options)[2]


def duration(problem: Problem, heads: Heads) -> Callable[[Operation], float]:
    """Of an operation of a schedule with heads."""
    known: dict[tuple[str, int, int, Kind], float] = {}

    def of(each: Operation) -> float:
        key = (each.model, each.pipeline, each.stage, each.kind)
        if key not in known:
            whole = heads.get(each.model, 0.0) if each.kind == "H" else None
            known[key] = problem.duration(problem.model(each.model), *key[1:]) if whole is None else whole
        return known[key]

    return of


def with_heads(problem: Problem, rows: Rows, heads: Heads, patient: bool = False) -> Rows:
    """The rows with the heads of these models. ScheduleError for rows that can't be run. `patient`: nothing begins that
    would run past a head whose time is known."""
    return _HeadInsertion(problem, rows, heads, patient).run()


class _HeadInsertion:
    """The schedule as it runs, operation by operation in the order in which they begin."""

    def __init__(self, problem: Problem, rows: Rows, heads: Heads, patient: bool):
        self.problem, self.rows, self.heads, self.patient = problem, rows, heads, patient
        self.seconds = duration(problem, heads)
        self.models = {model.name: model for model in problem.models}
        self.where = {each: device for device, row in enumerate(rows) for each in row}
        self.ends: dict[Operation, float] = {}
        self.free = [0.0] * len(rows)
        self.reached = [0] * len(rows)
        self.made: list[list[Operation]] = [[] for _ in rows]
        self.due: list[tuple[float, Operation]] = []  # heads of micro-batches that are only scored

    def run(self) -> Rows:
        while options := [*self._heads(), *self._operations()]:
            start, _, device, operation = min(self._in_time(options) if self.patient else options)
            if operation.kind == "H":
                self._run_head(start, operation)
            else:
                self._run_operation(start, device, operation)
        for device, row in enumerate(self.rows):
            if self.reached[device] < len(row):
                raise ScheduleError(f"The schedule waits for itself at {show(row[self.reached[device]])}.")
        return tuple(map(tuple, self.made))

    def _operations(self) -> Iterator[tuple[float, int, int, Operation]]:
        """(start, 1, device, operation) of each device's next operation, where its input is known."""
        for device, row in enumerate(self.rows):
            if self.reached[device] == len(row):
                continue
            operation = row[self.reached[device]]
            if operation.kind == "B" and self._is_last(operation) and self._head(operation) not in self.ends:
                continue
            ready, need = 0.0, needs(self.problem, operation)
            if need is not None:
                if need not in self.ends:
                    continue
                ready = self.ends[need] + (self.problem.communication if self.where[need] != device else 0.0)
            yield max(self.free[device], ready), 1, device, operation

    def _heads(self) -> Iterator[tuple[float, int, int, Operation]]:
        """(start, 0, device, head) of those that are due: the last stage has nothing to do before."""
        for start, head in self.due:
            yield start, 0, 0, head
        for device, row in enumerate(self.rows):
            operation = row[self.reached[device]] if self.reached[device] < len(row) else None
            if operation is None or operation.kind != "B" or not self._is_last(operation):
                continue
            forward, head = operation._replace(kind="F"), self._head(operation)
            if forward in self.ends and head not in self.ends:
                yield max(self.free[device], self.ends[forward]), 0, device, head

    def _in_time(self, options: list[tuple[float, int, int, Operation]]) -> list[tuple[float, int, int, Operation]]:
        """Those that end before their device has to meet the others; all, where none does."""
        meets = self._next_heads()
        return [
            each
            for each in options
            if each[3].kind == "H" or not each[0] < meets[each[2]] < each[0] + self.seconds(each[3]) - 1e-9
        ] or options

    def _next_heads(self) -> list[float]:
        """Of each device the start of its next head, where all that the last stage does before is known; else inf."""
        found = [math.inf] * len(self.rows)
        for device, row in enumerate(self.rows):
            now = self.free[device]
            for operation in row[self.reached[device] :]:
                need = needs(self.problem, operation)
                if operation.kind == "B" and self._is_last(operation) and self._head(operation) not in self.ends:
                    for each in self._devices(operation).values():
                        found[each] = min(found[each], now)
                    break
                if need is not None and need not in self.ends:
                    break
                now = max(now, self.ends[need] if need is not None else 0.0) + self.seconds(operation)
        return found

    def _devices(self, operation: Operation) -> dict[int, int]:
        model = self.models[operation.model]
        return {stage: self.problem.device(model, operation.pipeline, stage) for stage in range(model.stages)}

    def _is_last(self, operation: Operation) -> bool:
        model = self.models[operation.model]
        return operation.model in self.heads and operation.stage == self.problem.stages(model) - 1

    def _head(self, operation: Operation) -> Operation:
        return operation._replace(stage=0, kind="H")

    def _run_operation(self, start: float, device: int, operation: Operation) -> None:
        self.reached[device] += 1
        self.made[device].append(operation)
        self.ends[operation] = self.free[device] = start + self.seconds(operation)
        scored = self.models[operation.model].backward is None
        if scored and operation.kind == "F" and self._is_last(operation):
            self.due.append((self.free[device], self._head(operation)))

    def _run_head(self, start: float, head: Operation) -> None:
        self.due = [each for each in self.due if each[1] != head]
        devices = self._devices(head)
        start = max(start, *(self.free[device] for device in devices.values()))
        self.ends[head] = start + self.seconds(head)
        for stage, device in devices.items():
            self.made[device].append(head._replace(stage=stage))
            self.free[device] = self.ends[head]


def _more_in_flight(problem: Problem) -> Iterator[Rows]:
    if any(problem.chunks(model) > 1 for model in problem.models):
        return
    for slope, more in IN_FLIGHT:
        rows: list[list[Operation]] = [[] for _ in range(problem.devices)]
        for model in problem.models:
            for pipeline in range(model.pipelines):
                for stage in range(model.stages):
                    ahead = more + math.ceil(slope * (model.stages - 1 - stage))
                    line = _line(model, pipeline, stage, ahead, problem.kinds(model))
                    rows[problem.device(model, pipeline, stage)] += line
        yield tuple(map(tuple, rows))


def _line(model: Model, pipeline: int, stage: int, ahead: int, kinds: tuple[Kind, ...]) -> Iterator[Operation]:
    """A stage's operations, `ahead` forwards before the first backward."""
    for step in range(model.micro_batches + ahead):
        if step >= ahead:
            yield from (Operation(model.name, pipeline, stage, step - ahead, kind) for kind in kinds[1:])
        if step < model.micro_batches:
            yield Operation(model.name, pipeline, stage, step, "F")
