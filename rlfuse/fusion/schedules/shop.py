"""The problem as arrays: a job shop whose machines are the devices.

A *class* is one kind of operation of one stage of one pipeline. Its operations, one per micro-batch, run first in,
first out, which loses no optimum. Operation `first[c] + m` is micro-batch m of class c. A *lane* is one pipeline of one
model: F 0 .. F last, B last .. B 0, then the leaves W. An *order* is int64 [devices, operations of each].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.operations import Kind, Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import Timed

NONE = -1
F, B, W = 0, 1, 2
KINDS: tuple[Kind, ...] = ("F", "B", "W")
TOLERANCE = 1e-9  # relative tolerance of times and memory, whose sums are rounded


class Shop(NamedTuple):
    """Arrays over classes, except for the last two."""

    device: np.ndarray
    lane: np.ndarray
    kind: np.ndarray  # F, B or W
    duration: np.ndarray
    micro_batches: np.ndarray  # number of operations
    first: np.ndarray  # its first operation
    before: np.ndarray  # class of the data predecessor, or NONE
    lag: np.ndarray  # communication from there
    after: np.ndarray  # class of the next F or B in the chain, or NONE
    leaf: np.ndarray  # class of the W that follows a B, or NONE
    acquires: np.ndarray  # memory taken at the start
    releases: np.ndarray  # memory freed at the end
    class_of: np.ndarray  # operation -> class
    of_device: np.ndarray  # [devices, classes of each]

    @property
    def devices(self) -> int:
        return len(self.of_device)

    @property
    def row_length(self) -> int:
        return len(self.class_of) // self.devices


def backward_of(shop: Shop, c: int) -> int:
    """Return the backward class of the same stage for a forward class of a training lane."""
    lane = np.flatnonzero(shop.lane == shop.lane[c])
    stages = int((shop.kind[lane] == F).sum())
    return int(lane[0] + 2 * stages - 1 - (c - lane[0]))


def lanes(problem: Problem) -> list[tuple[Model, int]]:
    """Return every pipeline of every model."""
    return [(model, pipeline) for model in problem.models for pipeline in range(model.pipelines)]


def stages(problem: Problem, model: Model) -> list[tuple[int, int]]:
    """Return (stage, kind) of the classes of a lane, in order."""
    last, kinds = problem.stages(model), problem.kinds(model)
    chain = [(stage, F) for stage in range(last)]
    chain += [(stage, B) for stage in reversed(range(last)) if "B" in kinds]
    return chain + [(stage, W) for stage in range(last) if "W" in kinds]


def compile_problem(problem: Problem) -> Shop:
    """Return the arrays of a problem."""
    parts = [_lane(problem, model, pipeline, lane) for lane, (model, pipeline) in enumerate(lanes(problem))]
    offsets = np.cumsum([0] + [len(part["device"]) for part in parts])
    for part, offset in zip(parts, offsets, strict=False):
        for name in ("before", "after", "leaf"):
            part[name] = np.where(part[name] == NONE, NONE, part[name] + offset)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    count = columns["micro_batches"]
    of_device = np.argsort(columns["device"], kind="stable").reshape(problem.devices, -1)
    return Shop(
        first=np.cumsum(count) - count,
        class_of=np.repeat(np.arange(len(count)), count),
        of_device=of_device.astype(np.int64),
        **columns,
    )


def _lane(problem: Problem, model: Model, pipeline: int, lane: int) -> dict[str, np.ndarray]:
    classes = stages(problem, model)
    chain = sum(kind != W for _, kind in classes)
    releasing = W if problem.split_backward else B
    index = np.arange(len(classes))
    device = np.array([problem.device(model, pipeline, stage) for stage, _ in classes])
    kind = np.array([kind for _, kind in classes])
    activation = np.array([problem.activation(model, stage) for stage, _ in classes])
    own_stage = np.array([stage for stage, _ in classes])
    before = np.where(kind == W, chain - 1 - own_stage, index - 1)
    far = (before != NONE) & (device[before] != device)
    return {
        "device": device,
        "lane": np.full(len(classes), lane),
        "kind": kind,
        "duration": np.array([problem.duration(model, pipeline, stage, KINDS[kind]) for stage, kind in classes]),
        "micro_batches": np.full(len(classes), model.micro_batches),
        "before": before,
        "lag": np.where(far, problem.communication, 0.0),
        "after": np.where(index < chain - 1, index + 1, NONE),
        "leaf": np.where((kind == B) & problem.split_backward, chain + own_stage, NONE),
        "acquires": np.where(kind == F, activation, 0.0),
        "releases": np.where(kind == releasing, activation, 0.0),
    }


def operations(problem: Problem) -> list[Operation]:
    """Return the operations of a problem by number."""
    return [
        Operation(model.name, pipeline, stage, micro_batch, KINDS[kind])
        for model, pipeline in lanes(problem)
        for stage, kind in stages(problem, model)
        for micro_batch in range(model.micro_batches)
    ]


def to_rows(problem: Problem, order: np.ndarray) -> Rows:
    """Return an order as rows of operations."""
    names = operations(problem)
    return tuple(tuple(names[number] for number in row) for row in order.tolist())


def timed_rows(problem: Problem, order: np.ndarray) -> tuple[tuple[Timed, ...], ...]:
    """Return the operations of an order without deadlock, with their earliest times."""
    shop, names = compile_problem(problem), operations(problem)
    begin = starts(shop, order)
    end = begin + shop.duration[shop.class_of]
    return tuple(
        tuple(map(Timed, [names[number] for number in row.tolist()], begin[row].tolist(), end[row].tolist()))
        for row in order
    )


@njit(cache=True)
def starts(shop: Shop, order: np.ndarray) -> np.ndarray:
    """Return the earliest start of every operation under this order; NaN after a deadlock."""
    devices, length = order.shape
    begin = np.full(len(shop.class_of), np.nan)
    at, free = np.zeros(devices, np.int64), np.zeros(devices)
    waiting = np.ones(devices, np.bool_)
    moved = True
    while moved:
        moved = False
        for device in range(devices):
            if not waiting[device]:
                continue
            waiting[device] = False
            while at[device] < length:
                operation = order[device, at[device]]
                c = shop.class_of[operation]
                before, start = shop.before[c], free[device]
                if before != NONE:
                    previous = shop.first[before] + operation - shop.first[c]
                    ready = begin[previous] + shop.duration[before] + shop.lag[c]
                    if np.isnan(ready):
                        break
                    start = max(start, ready)
                begin[operation] = start
                free[device] = start + shop.duration[c]
                at[device] += 1
                moved = True
                if shop.after[c] != NONE:
                    waiting[shop.device[shop.after[c]]] = True
            # a stopped device is woken by the device of the predecessor that it waits for
    return begin


@njit(cache=True)
def makespan(shop: Shop, order: np.ndarray) -> float:
    """Return the end of the last operation; NaN for a deadlock."""
    begin = starts(shop, order)
    longest = 0.0
    for operation in range(len(begin)):
        if np.isnan(begin[operation]):
            return np.nan
        longest = max(longest, begin[operation] + shop.duration[shop.class_of[operation]])
    return longest


@njit(cache=True)
def held_before(shop: Shop, order: np.ndarray) -> np.ndarray:
    """Return the memory held before each operation of each device: [devices, operations per device + 1]."""
    devices, length = order.shape
    held = np.zeros((devices, length + 1))
    for device in range(devices):
        for place in range(length):
            c = shop.class_of[order[device, place]]
            held[device, place + 1] = held[device, place] + shop.acquires[c] - shop.releases[c]
    return held


@njit(cache=True)
def peak(shop: Shop, order: np.ndarray) -> float:
    """Return the peak memory over all devices, which depends only on the order."""
    most = 0.0
    for device in range(order.shape[0]):
        held = 0.0
        for operation in order[device]:
            c = shop.class_of[operation]
            held += shop.acquires[c]
            most = max(most, held)
            held -= shop.releases[c]
    return most
