"""The program of each device: the calls, in order, that execute a schedule. Used by executor and deadlock check.

    row of device d:   ... F2     B0     F3 ...
    program:           ... [post the receive for B1] -> wait for F2's input -> F2 -> send to the next stage's F2 ...

A receive is posted at most LOOKAHEAD operations ahead, and never before the operations of its device that the message
depends on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Protocol

from rlfuse.fusion.schedules.operations import Kind, Operation, Rows, shared_head
from rlfuse.fusion.schedules.problem import ScheduleError
from rlfuse.fusion.schedules.schedule import head_sizes, show, walk

LOOKAHEAD = 4  # operations
SHOWN = 8


class Stages(Protocol):
    """Layout of a model's pipelines; see `engines.pipeline.layout.Pipelines`."""

    model: str
    stages: int
    pipelines: int
    depth: int
    vocabulary: bool

    def device(self, pipeline: int, stage: int) -> int: ...

    def stages_on(self, device: int) -> tuple[int, ...]: ...

    def source(self, operation: Operation) -> int | None: ...

    def target(self, operation: Operation) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Lane:
    """Channel of one kind of message from one device to another."""

    model: str
    kind: Kind
    returning: bool  # the receiving stage is not the first of its device
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of an operation's input; local if sender and receiver are the same device."""

    operation: Operation
    lane: Lane

    @property
    def local(self) -> bool:
        return self.lane.sender == self.lane.receiver


@dataclass(frozen=True, slots=True)
class Step:
    """An operation with the transfers before and after it."""

    operation: Operation
    receives: tuple[Transfer, ...]  # receives to post before waiting for the input
    input: Transfer | None
    output: Transfer | None


Program = tuple[Step, ...]

BEFORE: dict[Kind, Kind | None] = {"F": None, "B": "F", "W": "B", "H": None}
"""Kind -> kind that the same stage must have run on the micro-batch before."""


def lanes(layout: Stages) -> list[Lane]:
    """Return a model's lanes between different devices, in the same order on all ranks."""
    numbers = [(pipeline, stage) for pipeline in range(layout.pipelines) for stage in range(layout.depth)]
    every = (_input(layout, Operation(layout.model, *number, 0, kind)) for kind in ("F", "B") for number in numbers)
    return list(dict.fromkeys(transfer.lane for transfer in every if transfer and not transfer.local))


@lru_cache(maxsize=16)
def programs(rows: Rows, layout: tuple[Stages, ...]) -> tuple[Program, ...]:
    """Return the program of each device. Raises ScheduleError for invalid rows, naming the operations."""
    models = {each.model: each for each in layout}
    _check_placed(rows, models)
    inputs = {each: _input(models[each.model], each) for row in rows for each in row}
    makers = {each: _maker(models[each.model], each) for each, transfer in inputs.items() if transfer}
    outputs = {makers[each]: transfer for each, transfer in inputs.items() if transfer}
    _check_made(rows, outputs, models)
    _check_heads(rows, models)
    launched = _launched_before(rows, makers)
    sent: dict[Lane, deque[Transfer]] = defaultdict(deque)
    for transfer in (outputs[each] for row in rows for each in row if each in outputs):
        sent[transfer.lane].append(transfer)

    def program(device: int, row: Sequence[Operation]) -> Program:
        steps, known = [], set()
        for position, operation in enumerate(row):
            receives = []
            for later in row[position : position + 1 + LOOKAHEAD]:
                transfer = inputs[later]
                if transfer is None or transfer.local or launched[makers[later]][device] > position:
                    continue
                while later not in known:
                    receives.append(sent[transfer.lane].popleft())
                    known.add(receives[-1].operation)
            steps.append(Step(operation, tuple(receives), inputs[operation], outputs.get(operation)))
        return tuple(steps)

    return tuple(program(device, row) for device, row in enumerate(rows))


def _input(layout: Stages, operation: Operation) -> Transfer | None:
    stage = layout.source(operation)
    if stage is None:
        return None
    sender, receiver = (layout.device(operation.pipeline, each) for each in (stage, operation.stage))
    lane = Lane(operation.model, operation.kind, operation.stage >= layout.stages, sender, receiver)
    return Transfer(operation, lane)


def _maker(layout: Stages, operation: Operation) -> Operation:
    stage = layout.source(operation)
    if stage is None:
        raise ValueError(f"{show(operation)} does not depend on another operation")
    return Operation(operation.model, operation.pipeline, stage, operation.micro_batch, operation.kind)


def _launched_before(rows: Rows, makers: Mapping[Operation, Operation]) -> dict[Operation, list[int]]:
    """Return operation -> number of operations of each device's row that must be launched before it can end."""
    counts: dict[Operation, list[int]] = {}
    latest = [[0] * len(rows) for _ in rows]
    for began in walk(rows, makers.get):
        for device, operation in began.items():
            if (maker := makers.get(operation)) is not None:
                latest[device] = list(map(max, latest[device], counts[maker]))
            latest[device][device] += 1
        together = [max(counted) for counted in zip(*(latest[device] for device in began), strict=True)]
        for device, operation in began.items():
            latest[device], counts[operation] = list(together), together
    stuck = {d: row[latest[d][d]] for d, row in enumerate(rows) if latest[d][d] < len(row)}
    if stuck:
        raise ScheduleError(f"The schedule deadlocks: {describe_stuck(stuck)}. Search a new schedule.")
    return counts


def describe_stuck(stuck: Mapping[int, Operation]) -> str:
    """Describe for a message where devices wait."""
    parts = [f"device {device} at {show(operation)}" for device, operation in sorted(stuck.items())]
    return "; ".join(parts[:SHOWN]) + (f"; and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")


def _check_placed(rows: Rows, models: Mapping[str, Stages]) -> None:
    seen = set()
    for device, row in enumerate(rows):
        for each in row:
            if each.model not in models:
                raise ScheduleError(f"{show(each)} is in the schedule, but the layout has only {sorted(models)}.")
            if (place := models[each.model].device(each.pipeline, each.stage)) != device:
                raise ScheduleError(f"{show(each)} is in row {device}, but its stage is on device {place}.")
            if each in seen:
                raise ScheduleError(f"{show(each)} is in the schedule twice.")
            seen.add(each)


def _check_made(rows: Rows, outputs: Mapping[Operation, Transfer], models: Mapping[str, Stages]) -> None:
    scheduled = {each for row in rows for each in row}
    for maker, transfer in outputs.items():
        if maker not in scheduled:
            raise ScheduleError(
                f"{show(transfer.operation)} needs the result of {show(maker)}, which is not in the schedule."
            )
    for row in rows:
        done = set()
        for each in row:
            if each not in outputs and models[each.model].target(each) is not None:
                raise ScheduleError(f"Nothing in the schedule takes the result of {show(each)}.")
            before = BEFORE[each.kind]
            if before and each._replace(kind=before) not in done:
                raise ScheduleError(f"{show(each)} comes before its {before}, or without it.")
            done.add(each)


def _check_heads(rows: Rows, models: Mapping[str, Stages]) -> None:
    """Check that all devices of a model with a shared head run it between F and B of the last stage."""
    members = head_sizes(rows)
    for device, row in enumerate(rows):
        done = set()
        for each in row:
            shared, last = models[each.model], models[each.model].depth - 1
            if each.kind == "H" and members[shared_head(each)] != (shared.stages if shared.vocabulary else 0):
                raise ScheduleError(f"{show(each)} is computed by {members[shared_head(each)]} devices.")
            if shared.vocabulary and shared.device(each.pipeline, last) == device:
                head = each._replace(stage=shared.stages_on(device)[0], kind="H")
                before = {"H": each._replace(stage=last, kind="F"), "B": head}.get(each.kind)
                if before and (each.kind, each.stage) in (("H", head.stage), ("B", last)) and before not in done:
                    raise ScheduleError(f"{show(each)} comes before {show(before)}, or without it.")
                if (each.kind, each.stage) == ("F", last) and not members[shared_head(head)]:
                    raise ScheduleError(f"Nothing in the schedule takes the result of {show(each)}.")
            done.add(each)


Queue = Callable[[Transfer], Hashable]  # transfer -> key of the device queue that its calls go to


QUEUES: Mapping[str, Queue] = {"gloo": attrgetter("operation"), "nccl": attrgetter("lane")}
"""gloo's tagged transfers are independent; calls of an NCCL communicator run in order of posting."""


def check_deadlock(rows: Rows, layout: tuple[Stages, ...]) -> None:
    """Raise ScheduleError if the schedule deadlocks on some backend."""
    made = programs(rows, layout)
    for backend, queue in QUEUES.items():
        if stuck := find_deadlock(made, queue):
            raise ScheduleError(f"The schedule deadlocks on {backend}: {describe_stuck(stuck)}. Search a new schedule.")


def find_deadlock(made: Sequence[Program], queue: Queue) -> dict[int, Operation]:
    """Return device -> the operation whose input never arrives; empty if there is no deadlock."""
    return _Replay(made, queue).run()


class _Replay:
    """Simulation of the programs of all devices."""

    def __init__(self, made: Sequence[Program], queue: Queue):
        self.programs, self.queue = made, queue
        self.calls: dict[tuple[int, Hashable], deque[Transfer]] = defaultdict(deque)
        self.arrived: set[Operation] = set()
        self.members = head_sizes(tuple(tuple(step.operation for step in program) for program in made))
        self.met: dict[Operation, set[int]] = defaultdict(set)
        self.reached = [0] * len(made)
        self.runnable = list(range(len(made)))

    def run(self) -> dict[int, Operation]:
        for device, program in enumerate(self.programs):
            self._post(device, program)
        while self.runnable:
            self._advance(self.runnable.pop())
        return {
            device: program[done].operation
            for device, (program, done) in enumerate(zip(self.programs, self.reached, strict=True))
            if done < len(program)
        }

    def _advance(self, device: int) -> None:
        program = self.programs[device]
        while self.reached[device] < len(program):
            step = program[self.reached[device]]
            if step.input is not None and step.operation not in self.arrived:
                return
            if step.operation.kind == "H" and not self._all_met(device, step.operation):
                return
            self.reached[device] += 1
            if step.output is not None and step.output.local:
                self.arrived.add(step.output.operation)
            elif step.output is not None:
                self._call(device, step.output)
            self._post(device, program)

    def _all_met(self, device: int, head: Operation) -> bool:
        """Return whether all devices of a shared head have reached it, and wake the others when the last arrives."""
        came, count = self.met[shared_head(head)], self.members[shared_head(head)]
        if device not in came:
            came.add(device)
            self.runnable += came - {device} if len(came) == count else ()
        return len(came) == count

    def _post(self, device: int, program: Program) -> None:
        if self.reached[device] < len(program):
            for transfer in program[self.reached[device]].receives:
                self._call(device, transfer)

    def _call(self, device: int, transfer: Transfer) -> None:
        self.calls[device, self.queue(transfer)].append(transfer)
        self._complete(transfer)

    def _complete(self, transfer: Transfer) -> None:
        lane, queue = transfer.lane, self.queue(transfer)
        ends = [self.calls[device, queue] for device in (lane.sender, lane.receiver)]
        if not all(calls and calls[0] is transfer for calls in ends):
            return
        for calls in ends:
            calls.popleft()
        self.arrived.add(transfer.operation)
        self.runnable.append(lane.receiver)
        for calls in ends:
            if calls:
                self._complete(calls[0])
