"""Which schedule a run trains by, from what its operations were measured to take.

Role: `rlfuse.engines.pipeline.pipeline_trainer` asks a `Planner` before every mini-batch and shows it afterwards what
ran when. Durations are medians over the last mini-batches, by model, stage and kind; those not measured yet are guessed
from those that were, a backward counting like two forwards. They are those of a device that is as fast as expected;
what a slow one takes is that times its rate. A schedule is kept until rates change, micro-batches in number, or a
duration by `DRIFT`. Micro-batches that a model only scores are a model of their own to the search, one without a
backward; in the schedule they are the model's, numbered behind those that it trains on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from rlfuse.fusion.schedules.baselines import serial_1f1b, serial_1f1b_rows
from rlfuse.fusion.schedules.operations import Kind, Operation, Rows
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import timed
from rlfuse.fusion.schedules.search import search

DRIFT = 0.2
KEPT = 64
"""Last durations of each operation."""
SEARCH_S = 2.0
SCORED = " (scored)"
"""Behind the name of a model whose micro-batches have no backward."""
Key = tuple[tuple[tuple[str, int], ...], ...]
"""Micro-batches of each model, trained on and scored."""
GUESS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "W": 1.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, and what it should take."""

    rows: Rows
    times: tuple[tuple[tuple[float, float], ...], ...]
    """Device -> start and end of each of its operations, in seconds; empty while nothing was measured."""
    serial_s: float
    """The same work in 1F1B, one model after the other, and then the passes that score."""
    trained: Mapping[str, int] = field(default_factory=dict)
    """Model -> micro-batches of each pipeline that it trains on; those numbered higher are scored."""

    @property
    def seconds(self) -> float:
        """Of the whole schedule; 0 while nothing was measured."""
        return max((row[-1][1] for row in self.times), default=0.0)

    def timed_as(self, operation: Operation) -> Operation:
        """Under the name by which the planner knows its duration."""
        if operation.micro_batch < self.trained.get(operation.model, 0):
            return operation
        return operation._replace(model=operation.model + SCORED)


class Planner:
    """`training`: `fused` searches, `serial` is 1F1B of one model after the other, backward whole.

    `memory_cap`: activations on a device, relative to `serial`; None: as many as there are.
    """

    def __init__(self, stages: int, training: str = "fused", split: bool = False, memory_cap: float | None = None):
        self.stages, self.training, self.memory_cap = stages, training, memory_cap
        self.split = split and training == "fused"
        self._seconds: dict[tuple[str, int, Kind], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._plans: dict[Key, tuple[Problem, Rows]] = {}
        self._rates: tuple[float, ...] = ()

    def replan(self, rates: Sequence[float]) -> None:
        """Schedules are searched for devices with these rates from now on.

        What was measured on a device while its real rate was not known yet is forgotten.
        """
        before, self._rates = self._rates or (1.0,) * self.stages, tuple(rates)
        self.forget(device for device, rate in enumerate(rates) if rate != before[device])

    def forget(self, devices: Iterable[int]) -> None:
        """What these devices were measured to take holds no more."""
        if changed := set(devices):
            self._plans.clear()
            for key in [key for key in self._seconds if self._device(*key[:2]) in changed]:
                del self._seconds[key]

    def learn(self, operation: Operation, seconds: float) -> None:
        """It took so long, without its wait for a peer (`Plan.timed_as`), or would have on a device as expected."""
        self._seconds[operation.model, operation.stage, operation.kind].append(seconds)

    def plan(self, trained: Mapping[str, int], scored: Mapping[str, int] | None = None) -> Plan:
        """The schedule for so many micro-batches of each model; searched if there is none or its times are old."""
        key: Key = tuple(tuple(sorted(each.items())) for each in (trained, scored or {}))
        problem = self.problem(trained, scored)
        if key not in self._plans or _drifted(self._plans[key][0], problem):
            self._plans[key] = problem, self._search(problem)
        rows = self._plans[key][1]
        planned = timed(problem, rows) if self._seconds else ()
        times = tuple(tuple((each.start, each.end) for each in row) for row in planned)
        ran = tuple(tuple(_as_run(each, trained) for each in row) for row in rows)
        return Plan(ran, times, serial_1f1b(problem), trained)

    def _search(self, problem: Problem) -> Rows:
        if self.training == "serial":
            return tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(problem))
        return search(problem, time_limit=SEARCH_S).operations

    def problem(self, trained: Mapping[str, int], scored: Mapping[str, int] | None = None) -> Problem:
        """What `plan` searches a schedule for."""
        models = [self._model(name, count) for name, count in sorted(trained.items())]
        models += [self._scoring(name, count) for name, count in sorted((scored or {}).items())]
        return Problem(
            self.stages, tuple(models), split_backward=self.split, memory_cap=self.memory_cap, rates=self._rates
        )

    def _device(self, model: str, stage: int) -> int:
        return stage if self.direction(model.removesuffix(SCORED)) == "down" else self.stages - 1 - stage

    def direction(self, model: str) -> Literal["down", "up"]:
        """Opposite for actor and critic, so that one's first stages fill the bubbles of the other's last ones.

        For the reference the one in which it fills more beside the actor: searched for 2 to 8 stages and as many or
        twice as many micro-batches, `up` is shorter by about a tenth where weights' gradients are apart, else `down`.
        """
        return "up" if model == "critic" or (model == "ref" and self.split) else "down"

    def _model(self, name: str, micro_batches: int) -> Model:
        forward, inputs, direction = self._times(name, "F"), self._times(name, "B"), self.direction(name)
        if not self.split:
            return Model(name, self.stages, micro_batches, forward, inputs, direction=direction)
        weights = self._times(name, "W")
        whole = tuple(map(sum, zip(inputs, weights, strict=True)))
        share = sum(weights) / sum(whole)
        return Model(name, self.stages, micro_batches, forward, whole, direction=direction, weight_gradient=share)

    def _scoring(self, name: str, micro_batches: int) -> Model:
        forward = self._times(name + SCORED, "F")
        return Model(name + SCORED, self.stages, micro_batches, forward, None, direction=self.direction(name))

    def _times(self, name: str, kind: Kind) -> tuple[float, ...]:
        return tuple(self._typical(name, stage, kind) for stage in range(self.stages))

    def _typical(self, model: str, stage: int, kind: Kind) -> float:
        """To two digits: noise is no reason for another schedule."""
        seconds = self._seconds.get((model, stage, kind))
        if seconds:
            return max(float(f"{median(seconds):.1e}"), 1e-6)
        paces = [median(each) / self._guess(measured) for (_, _, measured), each in self._seconds.items()]
        return self._guess(kind) * (median(paces) if paces else 1.0)

    def _guess(self, kind: Kind) -> float:
        return GUESS[kind] / (2 if kind == "B" and self.split else 1)


def _as_run(operation: Operation, trained: Mapping[str, int]) -> Operation:
    """As the executor knows it: one model, whose scored micro-batches come behind those that it trains on."""
    model = operation.model.removesuffix(SCORED)
    if model == operation.model:
        return operation
    return operation._replace(model=model, micro_batch=trained.get(model, 0) + operation.micro_batch)


def _drifted(before: Problem, now: Problem) -> bool:
    """Whether a stage's time is another by so much that the schedule should be too."""

    def times(problem: Problem) -> Iterable[float]:
        for model in problem.models:
            for kind in problem.kinds(model):
                for stage in range(model.stages):
                    yield problem.duration(model, 0, stage, kind)

    old, new = list(times(before)), list(times(now))
    scale = sum(new) / sum(old)  # all of them alike changes no schedule
    return any(abs(b / (a * scale) - 1) > DRIFT for a, b in zip(old, new, strict=True))
