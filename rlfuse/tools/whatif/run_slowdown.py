"""Measure what uneven work and slow machines cost a run, and find the likely cause.

no slow machine   the same work, predicted by fitted costs, at the speed of a typical worker
balanced          that work shared out evenly over all workers that did some of its kind
S = T / T_balanced = S_machine * S_skew,    S_machine = T / T_no_slow_machine,    waste = 1 - 1 / S
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from rlfuse.costs.fit import fit
from rlfuse.costs.rates import Group, comparable, typical_seconds
from rlfuse.events import Span
from rlfuse.samples import PASSES
from rlfuse.tools.whatif.causes import Cause, Seen, likely
from rlfuse.tools.whatif.operations import ALONE, Operations, Replay
from rlfuse.tools.whatif.run_operations import CONTROLLER, DRIVER, Recorded
from rlfuse.tools.whatif.slowdown import ATTRIBUTED, SLOWEST, largest_first

DECODING = ("decode", "prefill")
TRAINING = ("forward", "backward")
ONE_BY_ONE = [[kind] for kind in ("encode", *DECODING, *PASSES, *TRAINING)]
PHASES = [["encode"], [*DECODING, *PASSES], TRAINING]  # the shorter of the two ideals counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSlowdown:
    """Of a run's last steps; what attributes is None where `S` (`M_W`: `S_machine`) is below `ATTRIBUTED`."""

    steps: int
    S: float
    S_machine: float
    S_skew: float
    waste: float  # the share of all workers' time
    measured: float  # seconds of a step in the mean, by the driver's clock
    seconds: float  # the same, replayed as recorded
    no_slow_machine_seconds: float
    ideal_seconds: float
    launch_delay: float  # share of the recorded steps' time that the replay leaves out: how wrong it may be
    workers: dict[str, float]  # worker -> slowdown of the run by its machine alone, largest first
    rates: dict[str, float]  # worker -> seconds of its work over a typical worker's
    S_t: dict[str, float] | None = None  # kind of operation -> slowdown by it alone, largest first
    M_W: float | None = None  # share of the loss saved if the slowest 3 % of workers were typical
    M_S: float | None = None  # share of the loss saved if the last stage were balanced
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of every operation, float [N] each."""

    recorded: np.ndarray
    typical: np.ndarray  # no slow machine
    balanced: np.ndarray


class Analysis:
    """A recorded run, its replay and its ideals; questions are further durations for the same replay. `spans`: of the
    recorded steps, which costs are fitted to."""

    def __init__(self, recorded: Recorded, spans: Sequence[Span]):
        self.recorded, self.operations, self.replay = recorded, recorded.operations, Replay(recorded.operations)
        own = self.operations.own_seconds()
        typical = typical_seconds(_groups(recorded, fit(spans).costs.flat_batch), own, self.operations.rank)
        ways = [typical, *(balanced_seconds(self.operations, typical, kinds) for kinds in (ONE_BY_ONE, PHASES))]
        self.durations = Durations(own, typical, min(ways, key=self.mean))

    def mean(self, seconds: np.ndarray) -> float:
        return float(self.replay.step_seconds(seconds).mean())

    def _of(self, worker: str) -> np.ndarray:
        if worker not in self.recorded.workers:
            return np.zeros(len(self.operations), bool)
        return self.operations.rank == self.recorded.workers.index(worker)

    def found(self, decided_anew: Callable[[Mapping[str, float]], float | None] = lambda rates: None) -> RunSlowdown:
        """Replay the run as it was, under both ideals, and with each kind and worker as it was.

        `decided_anew`: from the rates of all workers, a step's time over what it would be where none were slow and the
        fusion policy decided accordingly, which no replay can tell; None where that is not known.
        """
        own, typical, balanced = self.durations.recorded, self.durations.typical, self.durations.balanced
        time, healthy, ideal = map(self.mean, (own, typical, balanced))
        rates = {worker: self._rate(self._of(worker)) for worker in self.recorded.workers if worker != DRIVER}
        if (ratio := decided_anew(rates)) is not None:
            healthy = min(healthy, time / ratio)
            ideal = min(ideal, healthy)
        measured = float(np.mean([step.seconds for step in self.recorded.steps]))
        workers = {worker: self.mean(np.where(self._of(worker), own, typical)) / self.mean(typical) for worker in rates}
        found: dict[str, Any] = {
            "steps": self.operations.steps,
            "S": time / ideal,
            "S_machine": time / healthy,
            "S_skew": healthy / ideal,
            "waste": max(0.0, 1 - ideal / time),
            "measured": measured,
            "seconds": time,
            "no_slow_machine_seconds": healthy,
            "ideal_seconds": ideal,
            "launch_delay": 1 - time / measured,
            "workers": largest_first(workers),
            "rates": largest_first(rates),
        }
        if found["S"] < ATTRIBUTED:
            return RunSlowdown(**found)
        found |= {"S_t": self._by_kind()}
        slow = list(found["workers"])[: ceil(SLOWEST * len(workers))]
        if found["S_machine"] >= ATTRIBUTED:
            found["M_W"] = self._share(np.logical_or.reduce([self._of(worker) for worker in slow]), typical)
        if self.operations.stages > 1:
            last = self.operations.stage == self.operations.stages - 1
            pipelined = ["pipeline" in piece.span.attributes for piece in self.recorded.pieces]
            found["M_S"] = self._share(last & pipelined, balanced)
        seen = Seen(self.recorded.pieces, own, typical, balanced, slow, self._share)
        return RunSlowdown(**found, cause=likely(found, seen))

    def _by_kind(self) -> dict[str, float]:
        own, balanced = self.durations.recorded, self.durations.balanced
        kinds = {name: self.operations.kinds_of(name) for name in self.operations.kinds if name != CONTROLLER}
        ideal = self.mean(balanced)
        return largest_first(
            {name: self.mean(np.where(part, own, balanced)) / ideal for name, part in kinds.items() if part.any()}
        )

    def _share(self, part: np.ndarray, ideal: np.ndarray) -> float:
        """Of what the ideal saves, that which is saved where only this part is ideal; 0 where it saves nothing."""
        own = self.durations.recorded
        time, best = self.mean(own), self.mean(ideal)
        return (time - self.mean(np.where(part, ideal, own))) / (time - best) if time > best else 0.0

    def _rate(self, part: np.ndarray) -> float:
        typical = self.durations.typical[part].sum()
        return float(self.durations.recorded[part].sum() / typical) if typical else 1.0


def _groups(recorded: Recorded, flat_batch: int) -> list[Group]:
    """Return the operations that are comparable; those of the driver are not."""
    pieces = [piece for piece in recorded.pieces if piece.worker != DRIVER]
    kinds = ["decode" if piece.kind in DECODING else piece.kind for piece in pieces]
    numbers = np.array([piece.number for piece in pieces])
    groups = comparable(kinds, [piece.span for piece in pieces], flat_batch)
    return [(numbers[mine], terms) for mine, terms in groups]


def balanced_seconds(operations: Operations, typical: np.ndarray, kinds: Sequence[Sequence[str]]) -> np.ndarray:
    """float [N]: the work of each of these sets of kinds in a step shared out evenly over the workers that did some.
    Operations of one kind on one worker take as long as one another."""
    balanced = typical.copy()
    for step in range(operations.steps):
        inside = (operations.step == step) & (operations.group == ALONE)
        for names in kinds:
            for part in (inside & operations.kinds_of(name) for name in names):
                if part.any():
                    _, of, counts = np.unique(operations.rank[part], return_inverse=True, return_counts=True)
                    balanced[part] = (np.bincount(of, typical[part]) / counts)[of]
            part = inside & operations.kinds_of(*names)
            if part.any():
                workers, of = np.unique(operations.rank[part], return_inverse=True)
                total = np.bincount(of, balanced[part])
                factor = np.divide(total.mean(), total, out=np.ones(len(workers)), where=total > 0)
                balanced[part] *= factor[of]
    return balanced
