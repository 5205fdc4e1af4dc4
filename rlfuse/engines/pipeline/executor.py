"""Runs one device's row of a pipeline schedule over torch.distributed, for all models that stand on the device.

Role: called by pipeline ranks, all ranks of a block with the same schedule. Takes any schedule in which every operation
comes after those it depends on in some order of all devices' rows; such a schedule cannot block here, because sends
never wait and receives don't wait for each other.

    device d, main thread: its row in order                    device e: likewise
      result --isend--> lane (model, F or B, half of the V) --irecv, posted `lookahead` operations early--> input
        `-> queue of sends -> sender thread: waits for one after the other and lets its tensor go
      to a neighbouring stage on the same device: a dictionary

Invariants:
- a lane is a process group of its own, in which messages between two devices go one way only. They are received in the
  order in which the peer's row sends them: right without tags (NCCL), and with them (gloo);
- a sent tensor lives until it has left. Gloo tells of that only to who waits, hence the sender thread;
- every wait for a peer is bounded by `timeout` and fails with an `EngineError` that names operation and peer. After an
  error the process group is of no more use.
Waits: only before an operation, for its input, and at the end of the row, for its sends. (Not run on GPUs; there a wait
orders streams, so a lost peer shows when NCCL's watchdog ends the process, and times are those of launches.)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlfuse.engines.pipeline.layout import Pipelines, block_size
from rlfuse.engines.protocols import EngineError
from rlfuse.fusion.schedules.operations import Operation, Rows

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


class ExecutableStage(Protocol):
    """What the executor needs of a stage; see `stages.Stage`."""

    dtype: torch.dtype
    device: str

    def shape(self, micro_batch: int) -> tuple[int, ...]: ...

    def forward(self, micro_batch: int, received: Tensor | None, training: bool) -> Tensor | None: ...

    def backward(self, micro_batch: int, gradient: Tensor | None, whole: bool) -> Tensor | None: ...

    def weight_gradients(self, micro_batch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation as it ran, in seconds since the epoch: it waited for its input from `ready` to `start`."""

    operation: Operation
    ready: float
    start: float
    end: float


Lane = tuple[str, str, bool]
"""(model, F or B, whether the receiving stage is in the second half of a V): one process group."""
Stages = Mapping[tuple[str, int], ExecutableStage]


class Executor:
    """One device of a block. All ranks create theirs at the same time with the same layout."""

    def __init__(self, layout: Sequence[Pipelines], timeout: float, lookahead: int = 4):
        self.layout = {pipelines.model: pipelines for pipelines in layout}
        self.timeout, self.lookahead = timeout, lookahead
        size = block_size(layout, dist.get_world_size())
        self.device = dist.get_rank() % size
        self.first_rank = dist.get_rank() - self.device
        limit = timedelta(seconds=timeout)
        halves = {pipelines.model: (False, True)[: pipelines.chunks] for pipelines in layout}
        self.groups: dict[Lane, Any] = {
            (model, kind, half): dist.new_group(timeout=limit)
            for model in self.layout
            for kind in "FB"
            for half in halves[model]
        }

    def run(self, rows: Rows, stages: Stages) -> list[Timed]:
        """Carry out this device's row; `stages` are those on it. Returns what ran when.

        EngineError when a peer is lost or silent for `timeout` seconds.
        """
        return _Run(self, rows, stages).all()

    def close(self) -> None:
        """Give up the lanes; all ranks at the same time."""
        for group in self.groups.values():
            dist.destroy_process_group(group)
        self.groups.clear()

    def lane(self, operation: Operation) -> Lane:
        """Where an operation's input comes from."""
        pipelines = self.layout[operation.model]
        return operation.model, operation.kind, operation.stage >= pipelines.stages

    def source(self, operation: Operation) -> int | None:
        """The device that an operation's input comes from; None if it has none."""
        pipelines = self.layout[operation.model]
        stage = pipelines.source(operation)
        return None if stage is None else pipelines.device(operation.pipeline, stage)

    def consumer(self, operation: Operation) -> Operation | None:
        """The operation that an operation's result is the input of."""
        pipelines = self.layout[operation.model]
        stage = pipelines.target(operation)
        if stage is None:
            return None
        return Operation(operation.model, operation.pipeline, stage, operation.micro_batch, operation.kind)

    def place(self, operation: Operation) -> int:
        """The device that an operation runs on."""
        return self.layout[operation.model].device(operation.pipeline, operation.stage)

    def wait(self, work: Any, purpose: str, rank: int) -> None:
        """Until a transfer with `rank` is done; `purpose` names it in the EngineError if it fails."""
        try:
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self.lost(purpose, rank, error) from error

    def lost(self, purpose: str, rank: int, error: Exception) -> EngineError:
        """What to raise for a transfer that failed."""
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return EngineError(
            f"trainer/{self.first_rank + self.device} waited {purpose} on trainer/{rank}, in vain: {reason}. If that "
            f"process died, out of memory is the usual cause; if it is only slow, raise cluster.timeout_s "
            f"({self.timeout:g} s)."
        )


class _Run:
    """One row being carried out. Messages are named by the operation that they are the input of."""

    def __init__(self, executor: Executor, rows: Rows, stages: Stages):
        self.executor, self.stages, self.row = executor, stages, rows[executor.device]
        own = {(o.model, o.stage, o.micro_batch, o.kind) for o in self.row}
        self.training = {key[:3] for key in own if key[3] == "B"}
        self.split = {key[:3] for key in own if key[3] == "W"}
        self.arriving: dict[tuple[Lane, int], deque[Operation]] = {}
        for device, row in enumerate(rows):
            if device != executor.device:
                self._expect(device, row)
        self.received: dict[Operation, tuple[Any, Tensor]] = {}
        self.handed: dict[Operation, Tensor] = {}
        self.sends = _Sends(executor)

    def _expect(self, device: int, row: Sequence[Operation]) -> None:
        for operation in row:
            consumer = self.executor.consumer(operation)
            if consumer is not None and self.executor.place(consumer) == self.executor.device:
                self.arriving.setdefault((self.executor.lane(consumer), device), deque()).append(consumer)

    def all(self) -> list[Timed]:
        timed = []
        for i, operation in enumerate(self.row):
            for later in self.row[i : i + 1 + self.executor.lookahead]:
                self._post(later)
            ready = time.time()
            tensor = self._input(operation)
            start = time.time()
            result = self._compute(operation, tensor)
            if result is not None:
                self._send(operation, result)
            timed.append(Timed(operation, ready, start, time.time()))
        self.sends.finish()
        return timed

    def _post(self, operation: Operation) -> None:
        """Post the receive of an operation's input, after those that the peer sends before it."""
        source = self.executor.source(operation)
        if source is None or source == self.executor.device or operation in self.received:
            return
        lane = self.executor.lane(operation)
        queue = self.arriving.get((lane, source), ())
        while operation not in self.received:
            if not queue:
                raise EngineError(
                    f"The schedule has {_described(operation)} on device {self.executor.device}, but its row of device "
                    f"{source} has no operation that makes its input: validate the schedule."
                )
            message = queue.popleft()
            stage = self.stages[message.model, message.stage]
            buffer = torch.empty(stage.shape(message.micro_batch), dtype=stage.dtype, device=stage.device)
            rank, group = self.executor.first_rank + source, self.executor.groups[lane]
            self.received[message] = self._start(dist.irecv, message, buffer, rank, group), buffer

    def _input(self, operation: Operation) -> Tensor | None:
        source = self.executor.source(operation)
        if source is None:
            return None
        if source == self.executor.device:
            return self.handed.pop(operation)
        work, buffer = self.received.pop(operation)
        self.executor.wait(work, f"for the input of {_described(operation)}", self.executor.first_rank + source)
        return buffer

    def _compute(self, operation: Operation, tensor: Tensor | None) -> Tensor | None:
        stage, key = self.stages[operation.model, operation.stage], operation.micro_batch
        same = (operation.model, operation.stage, key)
        if operation.kind == "F":
            return stage.forward(key, tensor, same in self.training)
        if operation.kind == "B":
            return stage.backward(key, tensor, same not in self.split)
        return stage.weight_gradients(key)

    def _send(self, operation: Operation, result: Tensor) -> None:
        consumer = self.executor.consumer(operation)
        if self.executor.place(consumer) == self.executor.device:
            self.handed[consumer] = result
            return
        group, tensor = self.executor.groups[self.executor.lane(consumer)], result.contiguous()
        rank = self.executor.first_rank + self.executor.place(consumer)
        work = self._start(dist.isend, consumer, tensor, rank, group)
        self.sends.add(work, tensor, f"to hand over the result of {_described(operation)}", rank)

    def _start(self, transfer: Any, message: Operation, tensor: Tensor, rank: int, group: Any) -> Any:
        try:
            return transfer(tensor, rank, group=group, tag=message.stage << 16 | message.micro_batch)
        except RuntimeError as error:
            raise self.executor.lost(f"to start the transfer to {_described(message)}", rank, error) from error


class _Sends:
    """The sends of a run, waited for by a thread of their own."""

    def __init__(self, executor: Executor):
        self.executor, self.error = executor, None
        self._queue: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name="pipeline sends", daemon=True)
        self._thread.start()

    def add(self, work: Any, tensor: Tensor, purpose: str, rank: int) -> None:
        """Keep `tensor` until `work` is done."""
        self._queue.put((work, tensor, purpose, rank))

    def finish(self) -> None:
        """Wait until all have left; EngineError for the first that did not."""
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _drain(self) -> None:
        side = torch.cuda.Stream() if dist.get_backend() == "nccl" else None  # else waits would hold computation up
        while (send := self._queue.get()) is not None:
            work, _, purpose, rank = send
            try:
                with torch.cuda.stream(side):
                    self.executor.wait(work, purpose, rank)
                    if side is not None:
                        side.synchronize()
            except EngineError as error:
                self.error = error
                return


def _described(operation: Operation) -> str:
    return (
        f"{operation.model} {_NAMES[operation.kind]}, stage {operation.stage} of pipeline {operation.pipeline}, "
        f"micro-batch {operation.micro_batch}"
    )
