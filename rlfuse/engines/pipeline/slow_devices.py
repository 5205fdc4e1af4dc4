"""Adapt pipelines to slow devices: rows per pipeline, expected durations, layers per stage. Pure functions.

Role: called by the group before it distributes rows, and by the trainer when rates change. A rate is time over expected
time, by device of all blocks (block * devices + device). All blocks have the same stages and schedule. Layers move only
if that is faster than giving fewer rows to the pipeline with the slow device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.partition import LayerCosts, stage_costs

Layout = Sequence[Pipelines]
MIN_GAIN = 1.05
"""Minimum speedup for layers to move, since reading a checkpoint takes time and measurements have errors."""


def with_layer_counts(layout: Layout, costs: Mapping[str, LayerCosts]) -> list[Pipelines]:
    """Return the layout with the layers of each stage, balanced where it does not set them."""
    return [replace(each, layers=each.layers or each.balanced(costs[each.model])) for each in layout]


def device_costs(layout: Layout, costs: Mapping[str, LayerCosts]) -> list[float]:
    """Return the total cost of the stages on each device of a block."""
    work = [0.0] * layout[0].devices
    for pipelines in with_layer_counts(layout, costs):
        stages = stage_costs(pipelines.layers or (), *costs[pipelines.model], pipelines.head_degree)
        for device in range(pipelines.devices):
            work[device] += sum(stages[stage] for stage in pipelines.stages_on(device))
    return work


def pipeline_rates(rates: Sequence[float], work: Sequence[float], stages: int) -> list[float]:
    """Return for each pipeline of `stages` stages the time of its slowest device over the expected one.

    Example: rates 1 and 2, where the slow device has a third of the work, give 1.
    """
    expected = [work[device % len(work)] for device in range(len(rates))]
    taken = [rate * cost for rate, cost in zip(rates, expected, strict=True)]
    firsts = range(0, len(rates), stages)
    return [max(taken[first : first + stages]) / max(expected[first : first + stages]) for first in firsts]


def operation_slowdowns(rates: Sequence[float], pipelines: Sequence[float]) -> list[float]:
    """Return the measured over expected duration of each device's operations, given that slow pipelines get fewer rows.

    `pipelines`: result of `pipeline_rates`.
    """
    speeds = [1 / rate for rate in pipelines]
    stages, mean = len(rates) // len(pipelines), sum(speeds) / len(speeds)
    return [rate * speeds[device // stages] / mean for device, rate in enumerate(rates)]


def repartition(
    layout: Layout, costs: Mapping[str, LayerCosts], rates: Sequence[float], free_layers: Sequence[int] | None = None
) -> list[Pipelines]:
    """Return a layout that is faster by `MIN_GAIN`, split by these rates or evenly; the current layout if there is
    none.

    `free_layers`: additional layers of every model that each device has memory for; None: unlimited.
    """
    now = with_layer_counts(layout, costs)
    devices = now[0].devices
    cuts = [now]
    for assumed in ([max(rates[device::devices]) for device in range(devices)], [1.0] * devices):
        cuts.append([_split(pipelines, costs[pipelines.model], assumed, free_layers) for pipelines in now])
    best = max(cuts, key=lambda cut: _speed(cut, costs, rates))
    return best if _speed(best, costs, rates) > MIN_GAIN * _speed(now, costs, rates) else now


def _split(
    pipelines: Pipelines, costs: LayerCosts, rates: Sequence[float], free_layers: Sequence[int] | None
) -> Pipelines:
    on = [[pipelines.device(p, stage) for p in range(pipelines.pipelines)] for stage in range(pipelines.depth)]
    more = [min(free_layers[each] for each in devices) // pipelines.chunks for devices in on] if free_layers else []
    most = [size + free for size, free in zip(pipelines.layers or (), more, strict=True)] if free_layers else []
    slowest = [max(rates[each] for each in devices) for devices in on]
    return replace(pipelines, layers=pipelines.balanced(costs, slowest, most))


def _speed(layout: Layout, costs: Mapping[str, LayerCosts], rates: Sequence[float]) -> float:
    """Return the total speed of all blocks if rows are distributed by speed; rounded, so that equal ones tie."""
    work = device_costs(layout, costs)
    ends = [
        max(rate * cost for rate, cost in zip(rates[first : first + len(work)], work, strict=True))
        for first in range(0, len(rates), len(work))
    ]
    return float(f"{sum(1 / end for end in ends):.6g}")
