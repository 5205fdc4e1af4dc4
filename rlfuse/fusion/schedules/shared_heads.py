"""Insert vocabulary-parallel heads, which all devices of a pipeline compute jointly (arXiv 2411.05288).

    last stage          F0 | H0 B0 F1 | H1 B1 F2 | ...     | : all devices of the pipeline synchronise
    stage before  F0 F1 F2 | H0       | H1 B0 F3 | ...     H: a share of the logits, the softmax and its gradients

No deadlock: `with_heads` simulates the schedule and records operations as they start, so the rows of all devices are
parts of one common order in which each operation follows its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from rlfuse.fusion.schedules.operations import Kind, Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.schedule import needs, peaks, show, timed

IN_FLIGHT = ((1.0, 1), (1.0, 2), (1.5, 1))
"""(Additional micro-batches in flight per earlier stage, micro-batches of the last stage); 1F1B has (1, 1). With 1.5, a
forward over two stages, or a backward over one, fits between two heads."""
Heads = Mapping[str, float]  # model -> seconds of a micro-batch's shared head


def best(problem: Problem, found: Rows, heads: Heads) -> Rows:
    """Return the shortest schedule with heads within the memory limit, based on `found` or on serial 1F1B."""
    options: list[tuple[float, int, Rows]] = []
    for rows, patient in product((found, *_more_in_flight(problem)), (False, True)):
        whole = with_heads(problem, rows, heads, patient)
        times = timed(problem, whole, duration(problem, heads))
        held = max(peaks(problem, times)) if options else 0.0
        if held <= problem.memory_limit * (1 + 1e-6):
            options.append((max(row[-1].end for row in times), len(options), whole))
    return min(options)[2]


def duration(problem: Problem, heads: Heads) -> Callable[[Operation], float]:
    """Return the function from an operation of a schedule with heads to its duration."""
    known: dict[tuple[str, int, int, Kind], float] = {}

    def of(each: Operation) -> float:
        key = (each.model, each.pipeline, each.stage, each.kind)
        if key not in known:
            whole = heads.get(each.model, 0.0) if each.kind == "H" else None
            known[key] = problem.duration(problem.model(each.model), *key[1:]) if whole is None else whole
        return known[key]

    return of


def with_heads(problem: Problem, rows: Rows, heads: Heads, patient: bool = False) -> Rows:
    """Return the rows with heads inserted. Raises ScheduleError for a deadlock.

    `patient`: no operation starts that would run past a head with a known start.
    """
    return _HeadInsertion(problem, rows, heads, patient).run()


class _HeadInsertion:
    """Simulation of a schedule that inserts heads, in the order in which operations start."""

    def __init__(self, problem: Problem, rows: Rows, heads: Heads, patient: bool):
        self.problem, self.rows, self.heads, self.patient = problem, rows, heads, patient
        self.seconds = duration(problem, heads)
        self.models = {model.name: model for model in problem.models}
        self.where = {each: device for device, row in enumerate(rows) for each in row}
        self.ends: dict[Operation, float] = {}
        self.free = [0.0] * len(rows)
        self.reached = [0] * len(rows)
        self.made: list[list[Operation]] = [[] for _ in rows]
        self.due: list[tuple[float, Operation]] = []  # heads of scored micro-batches

    def run(self) -> Rows:
        while options := [*self._heads(), *self._operations()]:
            start, _, device, operation = min(self._in_time(options) if self.patient else options)
            if operation.kind == "H":
                self._run_head(start, operation)
            else:
                self._run_operation(start, device, operation)
        for device, row in enumerate(self.rows):
            if self.reached[device] < len(row):
                raise ScheduleError(f"The schedule deadlocks at {show(row[self.reached[device]])}.")
        return tuple(map(tuple, self.made))

    def _operations(self) -> Iterator[tuple[float, int, int, Operation]]:
        """Yield (start, 1, device, operation) of each device's next operation with a known input."""
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
        """Yield (start, 0, device, head) of the heads that are next on their last stage."""
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
        """Return the options that end before the next head of their device; all options if there are none."""
        meets = self._next_heads()
        return [
            each
            for each in options
            if each[3].kind == "H" or not each[0] < meets[each[2]] < each[0] + self.seconds(each[3]) - 1e-9
        ] or options

    def _next_heads(self) -> list[float]:
        """Return the start of each device's next head, if all earlier work of the last stage is known; else inf."""
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
    """Yield the operations of a stage, with `ahead` forwards before the first backward."""
    for step in range(model.micro_batches + ahead):
        if step >= ahead:
            yield from (Operation(model.name, pipeline, stage, step - ahead, kind) for kind in kinds[1:])
        if step < model.micro_batches:
            yield Operation(model.name, pipeline, stage, step, "F")
