"""Plan pipeline schedules from the measured durations of operations.

A schedule is reused until rates, micro-batch counts or a duration (by more than `DRIFT`) change. In the search,
micro-batches that are only scored belong to a separate model without backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rlfuse.config.schema import Config
from rlfuse.fusion.schedules import shared_heads
from rlfuse.fusion.schedules.baselines import serial_1f1b, serial_1f1b_rows
from rlfuse.fusion.schedules.operations import Kind, Operation, Rows, direction_of, place_of
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.schedule import Timed, timed
from rlfuse.fusion.schedules.search import search

DRIFT = 0.2
MAX_DURATIONS = 64  # latest durations of each operation
SEARCH_S = 2.0
SCORED = " (scored)"  # suffix of a model whose micro-batches have no backward
Key = tuple[tuple[tuple[str, int], ...], ...]  # micro-batches of each model: trained, and only scored
GUESS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "W": 1.0, "H": 1.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with its predicted times."""

    rows: Rows
    times: tuple[tuple[tuple[float, float], ...], ...]  # device -> (start, end) of each operation, in seconds
    serial_s: float  # seconds of the same work in serial 1F1B, scoring passes included
    trained: Mapping[str, int] = field(default_factory=dict)  # model -> micro-batches that it trains on

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of the schedule; 0 before anything was measured."""
        return max((row[-1][1] for row in self.times), default=0.0)

    def planned_operation(self, operation: Operation) -> Operation:
        """Return the operation under which the planner records its duration."""
        if operation.micro_batch < self.trained.get(operation.model, 0):
            return operation
        return operation._replace(model=operation.model + SCORED)


class Planner:
    """Planner of the pipeline schedules of a run.

    training: `fused` searches a schedule; `serial` is 1F1B, one model after the other, with unsplit backward passes and
    one stage per device. memory_cap: activations per device relative to `serial`; None: unlimited. chunks: per device.
    vocabulary: devices share the heads of all models except the critic.
    """

    def __init__(
        self,
        stages: int,
        training: str = "fused",
        split: bool = False,
        memory_cap: float | None = None,
        chunks: int = 1,
        placement: str = "v",
        vocabulary: bool = False,
    ):
        self.vocabulary = vocabulary
        self.stages, self.training, self.memory_cap = stages, training, memory_cap
        self.chunks, self.placement = chunks, placement
        self.split = split and training == "fused"
        self._kinds: tuple[Kind, ...] = ("F", "B", "W") if self.split else ("F", "B")
        self._seconds: dict[tuple[str, int, Kind], deque[float]] = defaultdict(lambda: deque(maxlen=MAX_DURATIONS))
        self._plans: dict[Key, tuple[Problem, Rows, list[Rows]]] = {}
        self._rates: tuple[float, ...] = ()

    def replan(self, rates: Sequence[float]) -> None:
        """Search schedules for these device rates from now on, and forget durations measured under other rates."""
        before, self._rates = self._rates or (1.0,) * self.stages, tuple(rates)
        self.forget(device for device, rate in enumerate(rates) if rate != before[device])

    def forget(self, devices: Iterable[int]) -> None:
        if changed := set(devices):
            self._plans.clear()
            for key in [key for key in self._seconds if self._device(*key[:2]) in changed]:
                del self._seconds[key]

    def learn(self, operation: Operation, seconds: float) -> None:
        """Record the duration of a `Plan.planned_operation`, without waits and normalised by the device's rate."""
        self._seconds[operation.model, operation.stage, operation.kind].append(seconds)

    def stage_seconds(self, model: str) -> list[float] | None:
        """Return forward plus backward seconds of a micro-batch per stage of a trained model; None if unknown."""
        keys = [[(model, stage, kind) for kind in self._kinds] for stage in range(self.stages * self.chunks)]
        if not all(self._seconds.get(key) for stage in keys for key in stage):
            return None
        return [sum(median(self._seconds[key]) for key in stage) for stage in keys]

    def plan(self, trained: Mapping[str, int], scored: Mapping[str, int] | None = None) -> Plan:
        """Return the schedule for these micro-batches per model; search it if there is none or durations drifted."""
        key: Key = tuple(tuple(sorted(each.items())) for each in (trained, scored or {}))
        problem = self.problem(trained, scored)
        if key not in self._plans or _drifted(self._plans[key][0], problem):
            self._plans[key] = problem, self._search(problem), self._serial_with_heads(problem)
        _, rows, serial = self._plans[key]
        timed_rows = self._timed(problem, rows) if self._seconds else ()
        times = tuple(tuple((each.start, each.end) for each in row) for row in timed_rows)
        ran = tuple(tuple(_executed_operation(each, trained) for each in row) for row in rows)
        return Plan(ran, times, self._serial_s(problem, serial), trained)

    def _search(self, problem: Problem) -> Rows:
        heads = self._heads(problem)
        alone = len(problem.models) == 1 and not self.split and self.chunks == 1  # 1F1B is optimal
        if self.training == "serial" or (heads and alone):
            rows = _serial(problem)
        else:
            rows = search(problem, time_limit=SEARCH_S).operations
        return shared_heads.best(problem, rows, heads) if heads else rows

    def _timed(self, problem: Problem, rows: Rows) -> tuple[tuple[Timed, ...], ...]:
        return timed(problem, rows, shared_heads.duration(problem, self._heads(problem)))

    def _serial_with_heads(self, problem: Problem) -> list[Rows]:
        heads = self._heads(problem)
        return [shared_heads.with_heads(each, _serial(each), heads) for each in _one_by_one(problem)] if heads else []

    def _serial_s(self, problem: Problem, with_heads: list[Rows]) -> float:
        if not with_heads:
            return serial_1f1b(problem)
        parts = zip(_one_by_one(problem), with_heads, strict=True)
        return sum(max(row[-1].end for row in self._timed(*part)) for part in parts)

    def _heads(self, problem: Problem) -> dict[str, float]:
        """Return model -> seconds of a micro-batch's shared head."""
        policies = [each.name for each in problem.models if each.name.removesuffix(SCORED) != "critic"]
        slowest = max(self._rates, default=1.0)
        return {
            name: slowest * min(self._typical(name, stage, "H") for stage in range(self.stages))
            for name in (policies if self.vocabulary else ())
        }

    def problem(self, trained: Mapping[str, int], scored: Mapping[str, int] | None = None) -> Problem:
        models = [self._model(name, count) for name, count in sorted(trained.items())]
        models += [self._scoring(name, count) for name, count in sorted((scored or {}).items())]
        return Problem(
            self.stages,
            tuple(models),
            split_backward=self.split,
            memory_cap=self.memory_cap,
            chunks_per_device=self.chunks,
            placement=self.placement,
            rates=self._rates,
        )

    def _device(self, model: str, stage: int) -> int:
        place = place_of(stage, self.stages, self.placement)
        return place if direction_of(model.removesuffix(SCORED), self.split) == "down" else self.stages - 1 - place

    def _model(self, name: str, micro_batches: int) -> Model:
        forward, inputs, direction = self._times(name, "F"), self._times(name, "B"), direction_of(name, self.split)
        if not self.split:
            return Model(name, self.stages, micro_batches, forward, inputs, direction=direction)
        weights = self._times(name, "W")
        whole = tuple(map(sum, zip(inputs, weights, strict=True)))
        share = sum(weights) / sum(whole)
        return Model(name, self.stages, micro_batches, forward, whole, direction=direction, weight_gradient=share)

    def _scoring(self, name: str, micro_batches: int) -> Model:
        forward = self._times(name + SCORED, "F")
        direction = direction_of(name, self.split)
        return Model(name + SCORED, self.stages, micro_batches, forward, None, direction=direction)

    def _times(self, name: str, kind: Kind) -> tuple[float, ...]:
        return tuple(self._typical(name, stage, kind) for stage in range(self.stages * self.chunks))

    def _typical(self, model: str, stage: int, kind: Kind) -> float:
        """Return the median duration, rounded to two digits so that noise does not change the schedule."""
        seconds = self._seconds.get((model, stage, kind))
        if seconds:
            return max(float(f"{median(seconds):.1e}"), 1e-6)
        paces = [median(each) / self._guess(measured) for (_, _, measured), each in self._seconds.items()]
        return self._guess(kind) * (median(paces) if paces else 1.0)

    def _guess(self, kind: Kind) -> float:
        return GUESS[kind] / (2 if kind == "B" and self.split else 1)


def planner_of(config: Config) -> Planner:
    """Return the planner that the configuration describes."""
    training = config.training
    return Planner(
        training.pipeline_parallel_size,
        config.fusion.training,
        training.split_backward,
        training.activation_memory,
        training.virtual_pipeline_model_parallel_size,
        training.pipeline_placement,
        training.vocabulary_parallel,
    )


def _one_by_one(problem: Problem) -> list[Problem]:
    plain = problem.variant(split_backward=False, chunks_per_device=1)
    return [plain.only(model) for model in plain.models]


def _serial(problem: Problem) -> Rows:
    return tuple(tuple(each.operation for each in row) for row in serial_1f1b_rows(problem))


def _executed_operation(operation: Operation, trained: Mapping[str, int]) -> Operation:
    """Return the operation as the executor numbers it: scored micro-batches follow those that are trained."""
    model = operation.model.removesuffix(SCORED)
    if model == operation.model:
        return operation
    return operation._replace(model=model, micro_batch=trained.get(model, 0) + operation.micro_batch)


def _drifted(before: Problem, now: Problem) -> bool:
    def times(problem: Problem) -> Iterable[float]:
        for model in problem.models:
            for kind in problem.kinds(model):
                for stage in range(problem.stages(model)):
                    yield problem.duration(model, 0, stage, kind)

    old, new = list(times(before)), list(times(now))
    scale = sum(new) / sum(old)  # a common factor changes no schedule
    return any(abs(b / (a * scale) - 1) > DRIFT for a, b in zip(old, new, strict=True))
