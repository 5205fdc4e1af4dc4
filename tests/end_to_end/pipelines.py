"""Schedules of a layout, stages that only sleep, and slots, for tests and the benchmark of the executor."""

import time
from dataclasses import dataclass

import torch

from rlfuse.cluster.placement import Slots
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.fusion.schedules import shared_heads
from rlfuse.fusion.schedules.baselines import serial_1f1b_rows
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import timed
from rlfuse.fusion.schedules.search import search


def problem(layout, counts, seconds, split=False):
    """Return the scheduling problem; `seconds(model, stage, kind)` per micro-batch, B without W if they are split."""

    def model(pipelines):
        def each(kind):
            return tuple(seconds(pipelines.model, stage, kind) for stage in range(pipelines.depth))

        whole = tuple(map(sum, zip(each("B"), each("W"), strict=True))) if split else each("B")
        return Model(
            pipelines.model,
            pipelines.stages,
            counts[pipelines.model],
            each("F"),
            whole,
            pipelines.pipelines,
            direction=pipelines.direction,
            weight_gradient=sum(each("W")) / sum(whole) if split else 0.5,
            chunks_per_device=pipelines.chunks,
        )

    return Problem(layout[0].devices, tuple(map(model, layout)), split_backward=split, placement=layout[0].placement)


def serial(layout, counts, split=False):
    """Return the models' 1F1B schedules one after the other, W right after its B; for one chunk per device."""
    of = problem(layout, counts, lambda *_: 1.0, split)
    rows = serial_1f1b_rows(problem(layout, counts, lambda *_: 1.0))
    rows = tuple(tuple(part for each in row for part in _parts(each.operation, split)) for row in rows)
    return shared_heads.with_heads(of, rows, heads(layout, lambda *_: 1.0))


def heads(layout, seconds):
    """Return model -> seconds of its head, for models with a vocabulary-parallel head."""
    return {each.model: seconds(each.model, 0, "H") for each in layout if each.vocabulary}


def _parts(operation, split):
    return (operation, operation._replace(kind="W")) if split and operation.kind == "B" else (operation,)


def fused(layout, counts, seconds, split=False):
    """Return the best list schedule."""
    of, shared = problem(layout, counts, seconds, split), heads(layout, seconds)
    rows = search(of, method="list").operations
    return shared_heads.best(of, rows, shared) if shared else rows


def makespan(rows, layout, counts, seconds, split=False):
    """Return the simulated makespan without communication; raises if the rows deadlock."""
    of = problem(layout, counts, seconds, split)
    return max(row[-1].end for row in timed(of, rows, shared_heads.duration(of, heads(layout, seconds))))


def play(rank, rows, stages):
    """Run this rank's row of a schedule (called on every rank); return the seconds between two barriers."""
    torch.distributed.barrier()
    began = time.perf_counter()
    rank.executor.run(rows, stages)
    torch.distributed.barrier()
    return time.perf_counter() - began


class Sleeping:
    """A stage whose operations sleep, and send small tensors that record the stages passed."""

    dtype, device = torch.float32, "cpu"

    def __init__(self, pipelines, stage, seconds):
        self.pipelines, self.stage, self.seconds = pipelines, stage, seconds
        self.head_input, self.head_gradient = {}, {}

    head_shape = lambda self, micro_batch: self.shape(micro_batch)  # noqa: E731

    def shape(self, micro_batch):
        return (2, micro_batch + 1)

    def forward(self, micro_batch, received, training):
        assert received is None or (received.shape == self.shape(micro_batch) and (received == self.stage).all())
        time.sleep(self.seconds["F"])
        last, passed = self.stage == self.pipelines.depth - 1, torch.full(self.shape(micro_batch), self.stage + 1.0)
        if last:
            self.head_input[micro_batch] = passed
        return None if last else passed

    def head(self, micro_batch, hidden, training, gather, answers):
        assert float(hidden[0, 0]) == self.pipelines.depth
        gather(hidden)
        time.sleep(self.seconds["H"])
        return torch.ones(self.shape(micro_batch)) if training else None

    def backward(self, micro_batch, gradient, whole):
        assert gradient is None or (gradient == -self.stage - 1.0).all()
        if self.pipelines.vocabulary and self.stage == self.pipelines.depth - 1:
            assert float(self.head_gradient.pop(micro_batch)[0, 0]) == self.pipelines.stages
        time.sleep(self.seconds["B"] + (self.seconds["W"] if whole else 0))
        return None if self.stage == 0 else torch.full(self.shape(micro_batch), -float(self.stage))

    def weight_gradients(self, micro_batch):
        time.sleep(self.seconds["W"])


@dataclass(frozen=True)
class Anywhere(Slots):
    """Allows more ranks than the shared Ray cluster has slots."""

    def options(self, slot, share, environment, **more):
        return {"num_cpus": 0, "runtime_env": {"env_vars": worker_environment("cpu") | environment}} | more
