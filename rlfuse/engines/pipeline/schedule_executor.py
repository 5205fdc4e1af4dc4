"""Run one device's row of a pipeline schedule over torch.distributed, for all models on the device.

Results are sent through lanes, each a process group (`p2p_groups`), or kept for a stage on the same device.
Invariants: messages arrive in the order of the peer's row, with tags (gloo) or without (NCCL); sends never wait;
collectives of shared heads and layers have one order on all ranks. After an error the process group is unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlfuse.engines.pipeline.head_shares import HeadShares
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.p2p_groups import P2PGroups
from rlfuse.engines.pipeline.stages import Stage
from rlfuse.engines.pipeline.waits import WAITS
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules.operations import Operation, Rows
from rlfuse.fusion.schedules.transfers import Program, Step, Transfer, programs

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "H": "head"}


@dataclass(frozen=True, slots=True)
class TimedOperation:
    """Times of an operation, in epoch seconds; it waited for its input from `ready` to `start`."""

    operation: Operation
    ready: float
    start: float
    end: float


Stages = Mapping[tuple[str, int], Stage]


class ScheduleExecutor:
    """Executor of one device. All ranks create theirs at the same time with the same layout."""

    def __init__(
        self, layout: Sequence[Pipelines], timeout: float, on_operation: Callable[[str], None] = lambda _: None
    ):
        """Create the process groups. `on_operation`: called with the description of every operation that has ended."""
        self.layout, self.timeout, self.on_operation = tuple(layout), timeout, on_operation
        self.groups = P2PGroups(self.layout, timeout)
        self.device = self.groups.mesh.coordinates(self.groups.rank)["pp"]
        self.shares = {each.model: HeadShares(each, self.device, timeout) for each in layout if each.vocabulary}

    def run(self, rows: Rows, stages: Stages) -> list[TimedOperation]:
        """Run this device's row with its `stages`; return the timed operations.

        Raises EngineError if a peer is transfer_error or does not answer for `timeout` seconds, ScheduleError for
        invalid rows.
        """
        return _Run(self, programs(rows, self.layout)[self.device], stages).execute()

    def close(self) -> None:
        """Destroy the process groups; collective."""
        self.groups.close()

    def transfer_error(self, purpose: str, rank: int, error: Exception) -> EngineError:
        """Return the error to raise for a failed transfer."""
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return EngineError(
            f"trainer/{self.groups.rank} waited without success {purpose}, peer trainer/{rank}: {reason}. If that "
            f"process died, out of memory is the usual cause. If it is only slow, raise cluster.timeout_s "
            f"({self.timeout:g} s)."
        )


class _Run:
    """Run of one row. Messages are identified by the operation that receives them."""

    def __init__(self, executor: ScheduleExecutor, program: Program, stages: Stages):
        self.executor, self.program, self.stages = executor, program, stages
        operations = {(o.model, o.stage, o.micro_batch, o.kind) for o in (step.operation for step in program)}
        self.training = {key[:3] for key in operations if key[3] == "B"}
        self.split = {key[:3] for key in operations if key[3] == "W"}
        self.received: dict[Operation, tuple[Any, Tensor]] = {}
        self.local_results: dict[Operation, Tensor] = {}
        self.waits = WAITS[dist.get_backend()](executor.timeout, executor.transfer_error)

    def execute(self) -> list[TimedOperation]:
        moments = []
        for step in self.program:
            for transfer in step.receives:
                self._post(transfer)
            ready = self.waits.now()
            tensor = self._input(step)
            start = self.waits.now()
            result = self._compute(step.operation, tensor)
            self.executor.on_operation(_described(step.operation))
            if step.output is not None:
                self._send(step, result)
            end = self.waits.now()
            self.waits.mark_end(end, f"for the end of {_described(step.operation)}", self._awaited(step))
            moments.append((step.operation, ready, start, end))
        self.waits.finish()
        return [TimedOperation(operation, *map(self.waits.seconds, each)) for operation, *each in moments]

    def _peer(self, transfer: Transfer | None) -> int:
        """Return the sending rank of a transfer; for local ones the next tensor-parallel rank, or this rank."""
        groups = self.executor.groups
        local = transfer is None or transfer.local
        return groups.mesh.following(groups.rank, "tp") if local else groups.members(transfer.lane)[0]

    def _awaited(self, step: Step) -> int:
        """Return the rank to name if an operation does not end."""
        head = step.operation.kind == "H"
        return self.executor.shares[step.operation.model].awaited_rank if head else self._peer(step.input)

    def _post(self, transfer: Transfer) -> None:
        operation = transfer.operation
        stage = self.stages[operation.model, operation.stage]
        buffer = torch.empty(stage.shape(operation.micro_batch), dtype=stage.dtype, device=stage.device)
        self.received[operation] = self._start(dist.irecv, transfer, buffer, self._peer(transfer)), buffer

    def _input(self, step: Step) -> Tensor | None:
        if step.operation.kind == "H":
            return self._head_input(step.operation)
        if step.input is None:
            return None
        if step.input.local:
            return self.local_results.pop(step.operation)
        work, buffer = self.received.pop(step.operation)
        self.waits.wait_received(work, f"for the input of {_described(step.operation)}", self._peer(step.input))
        return buffer

    def _compute(self, operation: Operation, tensor: Tensor | None) -> Tensor | None:
        stage, key = self.stages[operation.model, operation.stage], operation.micro_batch
        same = (operation.model, operation.stage, key)
        if operation.kind == "H":
            return self._head(operation, tensor)
        if operation.kind == "F":
            return stage.forward(key, tensor, same in self.training)
        if operation.kind == "B":
            return stage.backward(key, tensor, same not in self.split)
        return stage.weight_gradients(key)

    def _head_input(self, operation: Operation) -> Tensor:
        """Return the head's input, broadcast from the last stage."""
        stage, last = self.stages[operation.model, operation.stage], self._last(operation)
        if last is not None:
            hidden = last.head_input.pop(operation.micro_batch)
        else:
            hidden = torch.empty(stage.head_shape(operation.micro_batch), dtype=stage.dtype, device=stage.device)
        self.executor.shares[operation.model].broadcast(hidden, self._waiter(operation))
        return hidden

    def _head(self, operation: Operation, hidden: Tensor) -> None:
        shares, last, waiter = self.executor.shares[operation.model], self._last(operation), self._waiter(operation)
        stage, number = self.stages[operation.model, operation.stage], operation.micro_batch
        training = (operation.model, operation.stage, number) in self.training
        gradient = stage.head(
            number, hidden, training, lambda operations: shares.gather(operations, waiter), shares.is_writer
        )
        if gradient is not None:
            shares.sum(gradient, waiter)
            if last is not None:
                last.head_gradient[number] = gradient

    def _last(self, operation: Operation) -> Stage | None:
        """Return the model's last stage if it is on this device."""
        return self.stages.get((operation.model, self.executor.shares[operation.model].layout.depth - 1))

    def _waiter(self, operation: Operation) -> Callable[[Any], None]:
        rank = self.executor.shares[operation.model].awaited_rank
        return lambda work: self.waits.wait_received(work, f"for all stages in {_described(operation)}", rank)

    def _send(self, step: Step, result: Tensor) -> None:
        if step.output.local:
            self.local_results[step.output.operation] = result
            return
        tensor, groups = result.contiguous(), self.executor.groups
        rank = groups.members(step.output.lane)[1]
        work = self._start(dist.isend, step.output, tensor, rank)
        self.waits.track_send(work, tensor, f"to hand over the result of {_described(step.operation)}", rank)

    def _start(self, call: Any, transfer: Transfer, tensor: Tensor, rank: int) -> Any:
        operation = transfer.operation
        try:
            tag = operation.stage << 16 | operation.micro_batch
            return call(tensor, rank, group=self.executor.groups[transfer.lane], tag=tag)
        except RuntimeError as error:
            raise self.executor.transfer_error(
                f"to start the transfer to {_described(operation)}", rank, error
            ) from error


def _described(operation: Operation) -> str:
    return (
        f"{operation.model} {_NAMES[operation.kind]}, stage {operation.stage} of pipeline {operation.pipeline}, "
        f"micro-batch {operation.micro_batch}"
    )
