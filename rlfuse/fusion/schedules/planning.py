"""Which schedule a run trains by, from what its operations were measured to take.

Role: `rlfuse.engines.pipeline.trainer` asks a `Planner` before every mini-batch and shows it afterwards what ran when.
Durations are medians over the last mini-batches, by model, stage and kind; before anything was measured, a backward
counts like two forwards. A schedule is kept until micro-batches change in number, or a duration by `DRIFT`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from rlfuse.fusion.schedules.baselines import serial_1f1b, serial_1f1b_rows
from rlfuse.fusion.schedules.operations import Kind, Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import timed
from rlfuse.fusion.schedules.search import search

DRIFT = 0.2
KEPT = 64
"""Last durations of each operation."""
SEARCH_S = 2.0
DIRECTIONS = {"actor": "down", "critic": "up"}
"""Opposite, so that one model's first stages fill the bubbles of the other's last ones."""
GUESS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "W": 1.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, and what it should take."""

    rows: Rows
    times: tuple[tuple[tuple[float, float], ...], ...]
    """Device -> start and end of each of its operations, in seconds; empty while nothing was measured."""
    serial_s: float
    """The same work in 1F1B, one model after the other."""

    @property
    def seconds(self) -> float:
        """Of the whole schedule; 0 while nothing was measured."""
        return max((row[-1][1] for row in self.times), default=0.0)


class Planner:
    """`training`: `fused` searches, `serial` is 1F1B of one model after the other, backward whole.

    `memory_cap`: activations on a device, relative to `serial`; None: as many as there are.
    """

    def __init__(self, stages: int, training: str = "fused", split: bool = False, memory_cap: float | None = None):
        self.stages, self.training, self.memory_cap = stages, training, memory_cap
        self.split = split and training == "fused"
        self._seconds: dict[tuple[str, int, Kind], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._plans: dict[tuple[tuple[str, int], ...], tuple[Problem, Rows]] = {}

    def learn(self, operation: Operation, seconds: float) -> None:
        """It took so long, without its wait for a peer."""
        self._seconds[operation.model, operation.stage, operation.kind].append(seconds)

    def plan(self, micro_batches: Mapping[str, int]) -> Plan:
        """The schedule for so many micro-batches of each model; searched if there is none or its times are old."""
        key, problem = tuple(sorted(micro_batches.items())), self._problem(micro_batches)
        if key not in self._plans or _drifted(self._plans[key][0], problem):
            self._plans[key] = problem, self._search(problem)
        rows = self._plans[key][1]
        planned = timed(problem, rows) if self._seconds else ()
        times = tuple(tuple((each.start, each.end) for each in row) for row in planned)
        return Plan(rows, times, serial_1f1b(problem))

    def _search(self, problem: Problem) -> Rows:
        if self.training == "serial":
            return tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(problem))
        return search(problem, time_limit=SEARCH_S).operations

    def _problem(self, micro_batches: Mapping[str, int]) -> Problem:
        models = tuple(self._model(name, count) for name, count in sorted(micro_batches.items()))
        return Problem(self.stages, models, split_backward=self.split, memory_cap=self.memory_cap)

    def _model(self, name: str, micro_batches: int) -> Model:
        forward = tuple(self._typical(name, stage, "F") for stage in range(self.stages))
        inputs = tuple(self._typical(name, stage, "B") for stage in range(self.stages))
        if not self.split:
            return Model(name, self.stages, micro_batches, forward, inputs, direction=DIRECTIONS[name])
        weights = tuple(self._typical(name, stage, "W") for stage in range(self.stages))
        whole = tuple(map(sum, zip(inputs, weights, strict=True)))
        share = sum(weights) / sum(whole)
        return Model(
            name, self.stages, micro_batches, forward, whole, direction=DIRECTIONS[name], weight_gradient=share
        )

    def _typical(self, model: str, stage: int, kind: Kind) -> float:
        """To two digits: noise is no reason for another schedule."""
        seconds = self._seconds.get((model, stage, kind))
        if seconds:
            return max(float(f"{median(seconds):.1e}"), 1e-6)
        return GUESS[kind] / (2 if kind == "B" and self.split else 1)


def _drifted(before: Problem, now: Problem) -> bool:
    """Whether a stage's time is another by so much that the schedule should be too."""

    def times(problem: Problem) -> Iterable[float]:
        for model in problem.models:
            for kind in problem.kinds:
                for stage in range(model.stages):
                    yield problem.duration(model, stage, kind)

    old, new = list(times(before)), list(times(now))
    scale = sum(new) / sum(old)  # all of them alike changes no schedule
    return any(abs(b / (a * scale) - 1) > DRIFT for a, b in zip(old, new, strict=True))
