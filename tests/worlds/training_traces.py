"""Profiler tables of training jobs with known durations: 1F1B, with or without model chunks.

Role: `table` computes every start and end from its definition, independently of the replay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pandas as pd

TRANSFER, GATHER, REDUCE, CLIP, OPTIMIZER = 0.02, 0.3, 0.5, 0.1, 0.4
COMPUTE = {"F": ("forward", 1.0), "B": ("backward", 2.0)}


@dataclass
class Job:
    """`slow`: (stage, rank) -> slowdown of its computation; `noise`: relative scatter of every computation."""

    stages: int = 4
    ranks: int = 4
    micro_batches: int = 8
    steps: int = 2
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    noise: float = 0.0
    delay: float = 0.0
    """Host time before every computation, in seconds."""
    last_stage: float = 1.0
    """Slowdown of the computation."""
    chunks: int = 1
    """Computing time of each stage's layers, in seconds."""
    lengths: float = 0.0
    """Standard deviation of the log cost of a micro-batch's sequences."""


Unit = tuple[str, int, int]
"""Direction, micro-batch and chunk of the stage's layers."""


def order(job: Job, stage: int) -> list[Unit]:
    """Return the order of a stage: 1F1B, or Megatron's interleaved order for several chunks."""
    total, group = job.micro_batches * job.chunks, job.stages * job.chunks

    def unit(kind: str, number: int) -> Unit:
        chunk = number % group // job.stages
        chunk = chunk if kind == "F" else job.chunks - 1 - chunk
        return kind, number // group * job.stages + number % job.stages, chunk

    if job.chunks == 1:
        ahead = min(job.stages - 1 - stage, total)
        forward, backward = [[(kind, i, 0) for i in range(total)] for kind in "FB"]
    else:
        ahead = min((job.stages - stage - 1) * 2 + (job.chunks - 1) * job.stages, total)
        forward, backward = [[unit(kind, i) for i in range(total)] for kind in "FB"]
    pairs = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
    return forward[:ahead] + pairs + backward[total - ahead :]


class Step:
    """One step of one rank: start and end of each operation, from 0."""

    def __init__(self, job: Job, rank: int, rng: np.random.Generator):
        self.job, self.rank, self.orders = job, rank, [order(job, stage) for stage in range(job.stages)]
        self.noise = rng.normal(1.0, job.noise, (2, job.stages, job.micro_batches, job.chunks)).clip(0.5, 1.5)
        if job.lengths:
            self.noise *= rng.lognormal(0.0, job.lengths, job.micro_batches)[:, None]
        self.end = cache(self.end)

    def seconds(self, unit: Unit, stage: int) -> float:
        last = stage == self.job.stages - 1
        slower = self.job.slow.get((stage, self.rank), 1.0) * (self.job.last_stage if last else 1.0)
        kind, micro_batch, chunk = unit
        return (
            COMPUTE[kind][1] / self.job.chunks * slower * float(self.noise["FB".index(kind), stage, micro_batch, chunk])
        )

    def neighbour(self, unit: Unit, stage: int, towards: int) -> tuple[Unit, int] | None:
        """Return the unit before (-1) or after (1) this one in the model for forward; reversed for backward."""
        kind, micro_batch, chunk = unit
        place = chunk * self.job.stages + stage + (towards if kind == "F" else -towards)
        if not 0 <= place < self.job.stages * self.job.chunks:
            return None
        return (kind, micro_batch, place // self.job.stages), place % self.job.stages

    def receives(self, unit: Unit, stage: int) -> float:
        """Return when the receive is posted: after the previous computation of its kind."""
        own = [each for each in self.orders[stage] if each[0] == unit[0]]
        position = own.index(unit)
        return self.end(own[position - 1], stage) if position else 0.0

    def received(self, unit: Unit, stage: int) -> float:
        source = self.neighbour(unit, stage, -1)
        return 0.0 if source is None else max(self.receives(unit, stage), self.end(*source)) + TRANSFER

    def start(self, unit: Unit, stage: int) -> float:
        position = self.orders[stage].index(unit)
        before = self.end(self.orders[stage][position - 1], stage) if position else 0.0
        first = GATHER if position == 0 and self.job.ranks > 1 else 0.0
        return max(before, first, self.received(unit, stage)) + self.job.delay

    def end(self, unit: Unit, stage: int) -> float:
        return self.start(unit, stage) + self.seconds(unit, stage)


def table(job: Job, seed: int = 0) -> pd.DataFrame:
    """Return the rows, with the duration of each step in `attrs["step_seconds"]`."""
    rng, rows, begin, lasted = np.random.default_rng(seed), [], 0.0, []
    for number in range(job.steps):
        steps = [Step(job, rank, rng) for rank in range(job.ranks)]
        done = np.array([[each.end(each.orders[stage][-1], stage) for stage in range(job.stages)] for each in steps])
        reduced = done.max(axis=0) + REDUCE if job.ranks > 1 else done[0]  # of each stage
        clipped = reduced.max() + CLIP
        for each in steps:
            for stage in range(job.stages):
                rows += [[number * 5, *row] for row in _worker(each, stage, begin)]
                tail = [
                    ("optimizer-clip-main-grad", reduced[stage], clipped),
                    ("optimizer", clipped, clipped + OPTIMIZER),
                ]
                if job.ranks > 1:
                    tail.insert(0, ("grads-reduce-scatter", done[each.rank, stage], reduced[stage]))
                rows += [[number * 5, each.rank, stage, kind, begin + a, b - a, 0, -1, 0, stage] for kind, a, b in tail]
        lasted.append(clipped + OPTIMIZER)
        begin += lasted[-1] + 1.0
    names = ["step", "dp_rank", "stage", "optype", "start_ts", "duration", "seq_id", "mb_id", "mc", "gmc"]
    found = pd.DataFrame(rows, columns=names)
    found["rank"] = found["dp_rank"] * job.stages + found["stage"]
    found.attrs["step_seconds"] = lasted
    return found.sample(frac=1, random_state=seed).reset_index(drop=True)


def _worker(step: Step, stage: int, begin: float) -> list[list]:
    rows, counts = [], Counter()

    def add(kind: str, start: float, end: float, micro_batch: int, chunk: int) -> None:
        numbers = [counts[kind], micro_batch, chunk, chunk * step.job.stages + stage]
        rows.append([step.rank, stage, kind, begin + start, end - start, *numbers])
        counts[kind] += 1

    if step.job.ranks > 1:
        add("params-all-gather", 0.0, GATHER, -1, 0)
    for unit in step.orders[stage]:
        (kind, micro_batch, chunk), target = unit, step.neighbour(unit, stage, 1)
        name, end = COMPUTE[kind][0], step.end(unit, stage)
        add(f"{name}-compute", step.start(unit, stage), end, micro_batch, chunk)
        if step.neighbour(unit, stage, -1) is not None:
            add(f"{name}-recv", step.receives(unit, stage), step.received(unit, stage), -1, chunk)
        if target is not None:
            add(f"{name}-send", end, step.received(*target), -1, chunk)
    return rows
