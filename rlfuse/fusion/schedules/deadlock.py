"""Replay what devices call to carry out a schedule: does it end, and if not, which device waits for which operation?

Calls of one queue run in order; a transfer happens when it is first in a queue of both its devices. gloo has a queue
per transfer, NCCL one per lane.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence

from rlfuse.fusion.schedules.operations import Operation, Rows, meeting
from rlfuse.fusion.schedules.problem import ScheduleError
from rlfuse.fusion.schedules.transfers import Lane, Program, Stages, Transfer, meetings, programs, told

Queue = Callable[[Transfer], Hashable]  # which of a device's queues the call for a transfer goes to


def own_queue(transfer: Transfer) -> Operation:
    """Gloo: tagged transfers are independent."""
    return transfer.operation


def queue_of_lane(transfer: Transfer) -> Lane:
    """NCCL: a communicator's calls run in the order of posting."""
    return transfer.lane


QUEUES: Mapping[str, Queue] = {"gloo": own_queue, "nccl": queue_of_lane}


def check(rows: Rows, layout: tuple[Stages, ...]) -> None:
    """ScheduleError unless the schedule ends on every backend."""
    made = programs(rows, layout)
    for backend, queue in QUEUES.items():
        if stuck := waiting(made, queue):
            raise ScheduleError(f"The schedule never ends over {backend}: {told(stuck)}. Search it again.")


def waiting(made: Sequence[Program], queue: Queue) -> dict[int, Operation]:
    """Device -> the operation whose input it waits for in vain; empty if the schedule ends."""
    return _Replay(made, queue).run()


class _Replay:
    """All devices at once."""

    def __init__(self, made: Sequence[Program], queue: Queue):
        self.programs, self.queue = made, queue
        self.calls: dict[tuple[int, Hashable], deque[Transfer]] = defaultdict(deque)
        self.arrived: set[Operation] = set()
        self.members = meetings(tuple(tuple(step.operation for step in program) for program in made))
        self.met: dict[Operation, set[int]] = defaultdict(set)
        self.reached = [0] * len(made)
        self.runnable = list(range(len(made)))

    def run(self) -> dict[int, Operation]:
        for device, program in enumerate(self.programs):
            self._post(device, program)
        while self.runnable:
            self._go_on(self.runnable.pop())
        return {
            device: program[done].operation
            for device, (program, done) in enumerate(zip(self.programs, self.reached, strict=True))
            if done < len(program)
        }

    def _go_on(self, device: int) -> None:
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
        """Whether all devices that compute a head have come to it; the others go on as soon as they have."""
        came, count = self.met[meeting(head)], self.members[meeting(head)]
        if device not in came:
            came.add(device)
            self.runnable += came - {device} if len(came) == count else ()
        return len(came) == count

    def _post(self, device: int, program: Program) -> None:
        if self.reached[device] < len(program):
            for transfer in program[self.reached[device]].posted:
                self._call(device, transfer)

    def _call(self, device: int, transfer: Transfer) -> None:
        self.calls[device, self.queue(transfer)].append(transfer)
        self._carry_out(transfer)

    def _carry_out(self, transfer: Transfer) -> None:
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
                self._carry_out(calls[0])
