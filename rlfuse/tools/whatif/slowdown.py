"""Measure the time lost to slow workers and uneven work in a run or training job (arXiv 2505.05713, OSDI '25).

S = T / T_ideal, waste = 1 - 1 / S. S_x: time with ideal durations except part x as recorded, over T_ideal.
M = (T - T_fixed) / (T - T_ideal), where T_fixed is the recorded run with ideal durations in one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from rlfuse.costs.fit import fit
from rlfuse.costs.rates import Group, group_comparable, typical_seconds
from rlfuse.events import Span
from rlfuse.samples import PASSES
from rlfuse.tools.whatif.causes import Cause, Evidence, correlation, likely_cause, likely_job_cause
from rlfuse.tools.whatif.operations import NO_GROUP, Operations, Replay
from rlfuse.tools.whatif.run_operations import CONTROLLER, DRIVER, RecordedOperations
from rlfuse.tools.whatif.study_trace import COMMUNICATION

MIN_SLOWDOWN = 1.03  # smaller slowdowns are within the error of the replay
SLOWEST = 0.03  # share of the workers that `M_W` is about, rounded up
COMBINED_KINDS = {
    "forward-pp-comm": ("forward-send", "forward-recv"),
    "backward-pp-comm": ("backward-send", "backward-recv"),
}
"""Kinds of a training job that are also attributed in combination."""
DECODING = ("decode", "prefill")
TRAINING = ("forward", "backward")
ONE_BY_ONE = [[kind] for kind in ("encode", *DECODING, *PASSES, *TRAINING)]
PHASES = [["encode"], [*DECODING, *PASSES], TRAINING]  # the shorter of both ideals counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Slowdown of recorded steps; fields that attribute it are None if `S` is below `MIN_SLOWDOWN`."""

    S: float
    waste: float  # share of worker time lost
    seconds: float  # mean step time, replayed as recorded
    ideal_seconds: float
    launch_delay: float  # share of the recorded time missing in the replay: its error
    S_t: dict[str, float] | None = None  # kind of operation -> slowdown by this kind alone, largest first
    M_W: float | None = None  # share of the lost time saved if the slowest 3 % of workers were ideal
    M_S: float | None = None  # share of the lost time saved if the last stage were ideal
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSlowdown(Slowdown):
    """Slowdown of a training job, with equal ideal durations for all operations of a kind."""

    workers: list[list[float]] | None = None  # [stage][data rank]: slowdown by that worker alone
    M_L: float | None = None  # share of the lost time saved with equal micro-batches
    correlation: float | None = None  # of forward and backward durations; None: too few, or constant


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSlowdown(Slowdown):
    """Slowdown of the last steps of a run: S = S_machine * S_skew. The ideal is the same work, predicted by fitted
    costs at the speed of a typical worker and balanced. `M_W` is None if `S_machine` is below `MIN_SLOWDOWN`."""

    steps: int
    S_machine: float
    S_skew: float
    measured: float  # mean step time measured by the driver
    no_slow_machine_seconds: float
    workers: dict[str, float]  # worker -> slowdown of the run by this worker alone, largest first
    rates: dict[str, float]  # worker -> its seconds over those of a typical worker


class _Analysis:
    """Operations and their replay with other durations, float [N]; `durations`: the recorded ones."""

    def __init__(self, operations: Operations):
        self.operations, self.replay = operations, Replay(operations)
        self.durations = operations.durations()
        self.seconds = self.mean(self.durations)

    def mean(self, durations: np.ndarray) -> float:
        return float(self.replay.step_seconds(durations).mean())

    def share(self, fixed: np.ndarray, ideal: np.ndarray) -> float:
        """Return the time saved by `fixed` over that saved by `ideal`; 0 if `ideal` saves nothing."""
        best = self.mean(ideal)
        return (self.seconds - self.mean(fixed)) / (self.seconds - best) if self.seconds > best else 0.0

    def alone(self, part: np.ndarray, ideal: np.ndarray) -> float:
        """Return the slowdown if only this part of the operations, bool [N], is as recorded."""
        return self.mean(np.where(part, self.durations, ideal)) / self.mean(ideal)

    def by_kind(self, ideal: np.ndarray, more: Mapping[str, Sequence[str]]) -> dict[str, float]:
        names = {name: (name,) for name in self.operations.kinds if name != CONTROLLER} | more
        parts = {name: self.operations.has_kind(*kinds) for name, kinds in names.items()}
        return _largest_first({name: self.alone(part, ideal) for name, part in parts.items() if part.any()})


class Job(_Analysis):
    """A recorded training job."""

    def __init__(self, operations: Operations):
        super().__init__(operations)
        self.ideal, self.even = ideal_seconds(operations, self.durations), even_seconds(operations, self.durations)

    def slowdown(self) -> JobSlowdown:
        """Replay the job as recorded, ideally, and with each kind, stage and rank as recorded."""
        operations, ideal = self.operations, self.mean(self.ideal)
        slowdown = self.seconds / ideal if ideal else 1.0
        first, last = np.full(operations.steps, np.inf), np.full(operations.steps, -np.inf)
        np.minimum.at(first, operations.step, operations.start)
        np.maximum.at(last, operations.step, operations.end)
        found: dict[str, Any] = {
            "S": slowdown,
            "waste": 1 - 1 / slowdown,
            "seconds": self.seconds,
            "ideal_seconds": ideal,
            "launch_delay": 1 - self.seconds / float((last - first).mean()),
        }
        if slowdown < MIN_SLOWDOWN:
            return JobSlowdown(**found)
        workers, (forward, backward, chunk) = self._workers(), operations.pairs.T
        of = np.stack([operations.rank[forward], chunk], axis=1)
        found |= {
            "S_t": self.by_kind(self.ideal, COMBINED_KINDS),
            "workers": workers.tolist(),
            "M_W": self.share(self.without(slowest(operations, workers)), self.ideal),
            "M_S": self.share(self.without(operations.stage == operations.stages - 1), self.ideal),
            "M_L": self.share(self.even, self.ideal),
            "correlation": correlation(of, self.durations[forward], self.durations[backward]),
        }
        return JobSlowdown(**found, cause=likely_job_cause(found, len(operations.pairs)))

    def without(self, part: np.ndarray) -> np.ndarray:
        """Return the recorded durations with ideal ones for a part, bool [N]."""
        return np.where(part, self.ideal, self.durations)

    def _workers(self) -> np.ndarray:
        """Return float [stages, ranks]: slowdown by worker. A worker is slow if its stage and its rank are, which takes
        stages + ranks replays instead of their product."""
        stage, rank = self.operations.stage, self.operations.rank
        by_stage = np.array([self.alone(stage == each, self.ideal) for each in range(self.operations.stages)])
        by_rank = np.array([self.alone(rank == each, self.ideal) for each in range(self.operations.ranks)])
        return np.minimum(by_stage[:, None], by_rank[None, :])


def ideal_seconds(operations: Operations, seconds: np.ndarray) -> np.ndarray:
    """Return float [N]: mean of each kind of computation, median of each kind of transfer (long tails)."""
    ideal = np.empty(len(operations))
    for number, name in enumerate(operations.kinds):
        if (of_kind := operations.kind == number).any():
            typical = np.median if name in COMMUNICATION else np.mean
            ideal[of_kind] = typical(seconds[of_kind])
    return ideal


def even_seconds(operations: Operations, seconds: np.ndarray) -> np.ndarray:
    """Return float [N]: durations if all micro-batches of a model chunk took their mean, forward and backward."""
    even, chunk = seconds.copy(), operations.pairs[:, 2]
    for direction in operations.pairs[:, :2].T:
        counts = np.maximum(np.bincount(chunk), 1)
        even[direction] = (np.bincount(chunk, seconds[direction]) / counts)[chunk]
    return even


def slowest(operations: Operations, workers: np.ndarray) -> np.ndarray:
    """Return bool [N]: the operations of the slowest workers."""
    order = np.argsort(-workers.ravel(), kind="stable")[: ceil(SLOWEST * workers.size)]
    return np.isin(operations.stage * workers.shape[1] + operations.rank, order)


def _largest_first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


class Run(_Analysis):
    """A recorded run. `typical`: durations without slow machines; `balanced`: these, with work also balanced."""

    def __init__(self, recorded: RecordedOperations, spans: Iterable[Span]):
        """Fit costs to `spans`, the spans of the recorded steps."""
        super().__init__(recorded.operations)
        self.recorded = recorded
        groups = _groups(recorded, fit(list(spans)).costs.flat_batch)
        self.typical = typical_seconds(groups, self.durations, self.operations.rank)
        ways = (balanced_seconds(self.operations, self.typical, kinds) for kinds in (ONE_BY_ONE, PHASES))
        self.balanced = min((self.typical, *ways), key=self.mean)

    def _of(self, worker: str) -> np.ndarray:
        if worker not in self.recorded.workers:
            return np.zeros(len(self.operations), bool)
        return self.operations.rank == self.recorded.workers.index(worker)

    def slowdown(
        self, resimulated_ratio: Callable[[Mapping[str, float]], float | None] = lambda rates: None
    ) -> RunSlowdown:
        """Replay the run as recorded, under both ideals, and with each kind and worker as recorded.

        `resimulated_ratio`: maps the rates of all workers to the step time over that without slow workers, with the
        decisions of the fusion policy simulated again, which a replay cannot do; None if unknown.
        """
        healthy, ideal = self.mean(self.typical), self.mean(self.balanced)
        rates = {worker: self._rate(self._of(worker)) for worker in self.recorded.workers if worker != DRIVER}
        if (ratio := resimulated_ratio(rates)) is not None:
            healthy = min(healthy, self.seconds / ratio)
            ideal = min(ideal, healthy)
        measured = float(np.mean([step.seconds for step in self.recorded.steps]))
        workers = {worker: self.alone(self._of(worker), self.typical) for worker in rates}
        found: dict[str, Any] = {
            "steps": self.operations.steps,
            "S": self.seconds / ideal,
            "S_machine": self.seconds / healthy,
            "S_skew": healthy / ideal,
            "waste": max(0.0, 1 - ideal / self.seconds),
            "measured": measured,
            "seconds": self.seconds,
            "no_slow_machine_seconds": healthy,
            "ideal_seconds": ideal,
            "launch_delay": 1 - self.seconds / measured,
            "workers": _largest_first(workers),
            "rates": _largest_first(rates),
        }
        if found["S"] < MIN_SLOWDOWN:
            return RunSlowdown(**found)
        found |= {"S_t": self.by_kind(self.balanced, {})}
        slow = list(found["workers"])[: ceil(SLOWEST * len(workers))]
        if found["S_machine"] >= MIN_SLOWDOWN:
            found["M_W"] = self._saved(np.logical_or.reduce([self._of(worker) for worker in slow]), self.typical)
        if self.operations.stages > 1:
            last = self.operations.stage == self.operations.stages - 1
            pipelined = ["pipeline" in piece.span.attributes for piece in self.recorded.pieces]
            found["M_S"] = self._saved(last & pipelined, self.balanced)
        seen = Evidence(self.recorded.pieces, self.durations, self.typical, self.balanced, slow, self._saved)
        return RunSlowdown(**found, cause=likely_cause(found, seen))

    def _saved(self, part: np.ndarray, ideal: np.ndarray) -> float:
        return self.share(np.where(part, ideal, self.durations), ideal)

    def _rate(self, part: np.ndarray) -> float:
        typical = self.typical[part].sum()
        return float(self.durations[part].sum() / typical) if typical else 1.0


def _groups(recorded: RecordedOperations, flat_batch: int) -> list[Group]:
    """Return groups of comparable operations, without those of the driver."""
    pieces = [piece for piece in recorded.pieces if piece.worker != DRIVER]
    kinds = ["decode" if piece.kind in DECODING else piece.kind for piece in pieces]
    numbers = np.array([piece.number for piece in pieces])
    groups = group_comparable(kinds, [piece.span for piece in pieces], flat_batch)
    return [(numbers[mine], terms) for mine, terms in groups]


def balanced_seconds(operations: Operations, typical: np.ndarray, kinds: Sequence[Sequence[str]]) -> np.ndarray:
    """Return float [N]: durations if the work of each set of kinds in a step were balanced over the workers that did
    some. Operations of one kind on one worker then take equally long."""
    balanced = typical.copy()
    for step in range(operations.steps):
        inside = (operations.step == step) & (operations.group == NO_GROUP)
        for names in kinds:
            for part in (inside & operations.has_kind(name) for name in names):
                if part.any():
                    _, of, counts = np.unique(operations.rank[part], return_inverse=True, return_counts=True)
                    balanced[part] = (np.bincount(of, typical[part]) / counts)[of]
            part = inside & operations.has_kind(*names)
            if part.any():
                workers, of = np.unique(operations.rank[part], return_inverse=True)
                total = np.bincount(of, balanced[part])
                factor = np.divide(total.mean(), total, out=np.ones(len(workers)), where=total > 0)
                balanced[part] *= factor[of]
    return balanced
