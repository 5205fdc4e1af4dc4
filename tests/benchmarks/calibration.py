"""A calibration file: curves measured on a device, and the cost model fitted to them.

Role: pure; `gpu_curves.py` measures and writes. `costs` in the file are the fields of `rlfuse.costs.model.Costs`.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace

from rlfuse.costs.fit import Fit, fit
from rlfuse.events import Span

FORMAT = "rlfuse device curves 1"
STATES_BYTES = 14
"""Bytes per parameter that a rank moves: bfloat16 weight, float32 master and two moments."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve, and the duration of each run there."""

    at: dict[str, int]
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Curves = dict[str, list[Point]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Parameters of the cost model that are no times."""

    parameters: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_sequences: int


def costs_of(curves: Curves, facts: Facts) -> Fit:
    """Return the cost model fitted to these curves, with `costs.fit` as for a run's events."""
    parameter, to_host, to_device = (
        _each(curves[curve], unit)
        for curve, unit in (("optimizer", "parameters"), ("to_host", "bytes"), ("to_device", "bytes"))
    )
    fitted = fit(spans_of({name: curves[name] for name in ("decode", "score", "train")}))
    prompts = fit(spans_of({"score": curves["prefill"]}))  # the cost of a pass: a constant, and a time per token
    costs = replace(
        fitted.costs,
        prefill_tokens_per_s=prompts.costs.score_tokens_per_s,
        optimizer_s=facts.parameters * parameter,
        switch_s=facts.parameters
        * (STATES_BYTES * to_host + 2 * to_device),  # ranks release the device, the engine's weights wake up
        kv_tokens=facts.kv_tokens,
        max_sequences=facts.max_sequences,
        kv_bytes_per_token=float(facts.kv_bytes_per_token),
        link_bytes_per_s=1 / (to_host + to_device),  # through host memory
    )
    return Fit(costs, fitted.accuracy | {"prefill": prompts.accuracy["scoring"]})


def _each(curve: list[Point], unit: str) -> float:
    """Return the seconds per unit at the long end of the curve."""
    largest = max(curve, key=lambda point: point.at[unit])
    return largest.median / largest.at[unit]


def spans_of(curves: Curves) -> list[Span]:
    """Return the runs of decoding and of passes as consecutive events of a job."""
    spans: list[Span] = []
    clock = 0.0

    def add(kind: str, where: str, seconds: float, tokens: int = 0, **attributes: int) -> None:
        spans.append(Span(kind, where, clock, clock + seconds, tokens=tokens, attributes=attributes))

    for name, curve in curves.items():
        for at, seconds in ((point.at, each) for point in curve for each in point.seconds):
            if name == "decode":
                held = at["batch"] * at["context"]
                add("decode", "rollout/0", seconds, steps=1, batch=at["batch"], context=held, prefill_tokens=0)
            else:
                driver, rank = {"score": ("old_log_prob",) * 2, "train": ("update_actor", "backward")}[name]
                add(driver, "driver", seconds, slot=0)
                add(rank, "trainer/0", seconds, at["tokens"])
            clock += 2 * seconds
    return spans


def calibration(curves: Curves, facts: Facts, made: dict[str, object]) -> dict[str, object]:
    """Return the content of the file; `made`: device, versions and date."""
    fitted = costs_of(curves, facts)
    return {
        "format": FORMAT,
        "made": made,
        "facts": asdict(facts),
        "costs": asdict(fitted.costs),
        "accuracy": {kind: asdict(each) for kind, each in fitted.accuracy.items()},
        "curves": {
            name: [
                point.at | {"seconds": point.median, "least": min(point.seconds), "most": max(point.seconds)}
                for point in curve
            ]
            for name, curve in curves.items()
        },
    }
