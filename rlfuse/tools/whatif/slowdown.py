"""What-if analysis of stragglers in a training job (arXiv 2505.05713, OSDI '25).

S = T / T_ideal        waste = 1 - 1 / S       S_x: ideal, but the part x as recorded, over T_ideal
M = (T - T_fixed) / (T - T_ideal), where a part is ideal in the recorded run: the slowest workers (M_W), the last
stage (M_S); or where all micro-batches are alike (M_L)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from rlfuse.tools.whatif.causes import Cause, correlation, likely_of_job
from rlfuse.tools.whatif.operations import Operations, Replay

ATTRIBUTED = 1.03  # a smaller slowdown is within the error of the replay
SLOWEST = 0.03  # of the workers, rounded up: those whose share of the slowdown is `M_W`
TOGETHER = {"forward-pp-comm": ("forward-send", "forward-recv"), "backward-pp-comm": ("backward-send", "backward-recv")}
"""Kinds that the study attributes together, beside each alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Of a recorded run; everything that attributes is None where `S` is below `ATTRIBUTED`."""

    S: float
    waste: float  # the share of all workers' time
    seconds: float  # of a step in the mean, replayed as recorded
    ideal_seconds: float
    launch_delay: float  # share of the recorded steps' time that the replay leaves out: how wrong it may be
    S_t: dict[str, float] | None = None  # kind of operation -> slowdown by it alone, largest first
    workers: list[list[float]] | None = None  # [stage][data rank]: slowdown by that worker alone
    M_W: float | None = None
    M_S: float | None = None
    M_L: float | None = None
    correlation: float | None = None  # of forward and backward durations; None: too few or constant
    cause: Cause | None = None


class Job:
    """A recorded training job, its replay and its ideal durations; questions are further durations for the replay."""

    def __init__(self, operations: Operations):
        self.operations, self.replay = operations, Replay(operations)
        self.recorded = operations.own_seconds()  # float [N]; as the next two
        self.ideal = ideal_seconds(operations, self.recorded)
        self.even = even_seconds(operations, self.recorded)

    def mean(self, seconds: np.ndarray) -> float:
        return float(self.replay.step_seconds(seconds).mean())

    def found(self) -> Slowdown:
        """Replay the job as it was, ideally, and with each kind, stage and rank as it was."""
        operations, time, ideal = self.operations, self.mean(self.recorded), self.mean(self.ideal)
        slowdown = time / ideal if ideal else 1.0
        first, last = np.full(operations.steps, np.inf), np.full(operations.steps, -np.inf)
        np.minimum.at(first, operations.step, operations.start)
        np.maximum.at(last, operations.step, operations.end)
        found: dict[str, Any] = {
            "S": slowdown,
            "waste": 1 - 1 / slowdown,
            "seconds": time,
            "ideal_seconds": ideal,
            "launch_delay": 1 - time / float((last - first).mean()),
        }
        if slowdown < ATTRIBUTED:
            return Slowdown(**found)

        def alone(part: np.ndarray) -> float:
            return self.mean(np.where(part, self.recorded, self.ideal)) / ideal

        def share(fixed: np.ndarray) -> float:
            return (time - self.mean(fixed)) / (time - ideal)

        workers = _workers(operations, alone)
        forward, backward, chunk = operations.pairs.T
        found |= {
            "S_t": _by_kind(operations, alone),
            "workers": workers.tolist(),
            "M_W": share(self.without(slowest(operations, workers))),
            "M_S": share(self.without(operations.stage == operations.stages - 1)),
            "M_L": share(self.even),
            "correlation": correlation(
                np.stack([operations.rank[forward], chunk], axis=1), self.recorded[forward], self.recorded[backward]
            ),
        }
        return Slowdown(**found, cause=likely_of_job(found, len(operations.pairs)))

    def without(self, part: np.ndarray) -> np.ndarray:
        """Return the recorded durations, float [N], but ideal ones for a part, bool [N]."""
        return np.where(part, self.ideal, self.recorded)


def ideal_seconds(operations: Operations, seconds: np.ndarray) -> np.ndarray:
    """float [N]: what each would take if all of its kind took the same: of computing the mean, of transfers the median.
    Transfers have a long tail of accidents, computing is worth what it is in the mean."""
    ideal = np.empty(len(operations))
    for number in range(len(operations.kinds)):
        if (of_kind := operations.kind == number).any():
            typical = np.median if operations.communicates[of_kind].any() else np.mean
            ideal[of_kind] = typical(seconds[of_kind])
    return ideal


def even_seconds(operations: Operations, seconds: np.ndarray) -> np.ndarray:
    """float [N]: what each would take if all micro-batches were alike: forward and backward of a chunk their mean."""
    even, chunk = seconds.copy(), operations.pairs[:, 2]
    for direction in operations.pairs[:, :2].T:
        counts = np.maximum(np.bincount(chunk), 1)
        even[direction] = (np.bincount(chunk, seconds[direction]) / counts)[chunk]
    return even


def _by_kind(operations: Operations, alone: Any) -> dict[str, float]:
    parts: Mapping[str, tuple[str, ...]] = {name: (name,) for name in operations.kinds} | TOGETHER
    return largest_first(
        {name: alone(part) for name, kinds in parts.items() if (part := operations.kinds_of(*kinds)).any()}
    )


def largest_first(values: Mapping[str, float]) -> dict[str, float]:
    """The same, in the order in which people read it."""
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _workers(operations: Operations, alone: Any) -> np.ndarray:
    """float [stages, ranks]. A worker is slow if both its stage and its rank are: two replays instead of a product."""
    by_stage = np.array([alone(operations.stage == stage) for stage in range(operations.stages)])
    by_rank = np.array([alone(operations.rank == rank) for rank in range(operations.ranks)])
    return np.minimum(by_stage[:, None], by_rank[None, :])


def slowest(operations: Operations, workers: np.ndarray) -> np.ndarray:
    """bool [N]: of the slowest workers."""
    order = np.argsort(-workers.ravel(), kind="stable")[: ceil(SLOWEST * workers.size)]
    return np.isin(operations.stage * workers.shape[1] + operations.rank, order)
