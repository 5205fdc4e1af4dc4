"""How pipelines adapt to slow devices: rows per pipeline, expected durations, layers per stage. Pure.

Role: called by the group before it divides rows, and by the trainer when rates change. A rate is time over expected
time, by device of all blocks (block * devices + device). All blocks share one cut into stages and one schedule; layers
move only if that ends sooner than giving fewer rows to the pipeline with the slow device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.partition import LayerCosts, stage_costs

Layout = Sequence[Pipelines]
GAIN = 1.05
"""Times as fast as before, for layers to move: reading a checkpoint takes time, and measuring errs."""


def with_layer_counts(layout: Layout, costs: Mapping[str, LayerCosts]) -> list[Pipelines]:
    """The layout with the layers of each stage, as ranks cut a model where it doesn't name them."""
    return [replace(each, layers=each.layers or each.balanced(costs[each.model])) for each in layout]


def device_costs(layout: Layout, costs: Mapping[str, LayerCosts]) -> list[float]:
    """Cost of all that stands on each device of a block."""
    work = [0.0] * layout[0].devices
    for pipelines in with_layer_counts(layout, costs):
        stages = stage_costs(pipelines.layers or (), *costs[pipelines.model], pipelines.sharers)
        for device in range(pipelines.devices):
            work[device] += sum(stages[stage] for stage in pipelines.stages_on(device))
    return work


def pipeline_rates(rates: Sequence[float], work: Sequence[float], stages: int) -> list[float]:
    """Of each pipeline of so many stages: how many times longer than expected its last device takes.

    Example: rates 1, 2 where the slow device has a third of the work: 1.
    """
    expected = [work[device % len(work)] for device in range(len(rates))]
    taken = [rate * own for rate, own in zip(rates, expected, strict=True)]
    firsts = range(0, len(rates), stages)
    return [max(taken[first : first + stages]) / max(expected[first : first + stages]) for first in firsts]


def operation_slowdowns(rates: Sequence[float], pipelines: Sequence[float]) -> list[float]:
    """Of each device: how many times longer than expected its operations take, as slow pipelines get fewer rows.

    `pipelines`: as `pipeline_rates` has them.
    """
    speeds = [1 / rate for rate in pipelines]
    stages, mean = len(rates) // len(pipelines), sum(speeds) / len(speeds)
    return [rate * speeds[device // stages] / mean for device, rate in enumerate(rates)]


def repartition(
    layout: Layout, costs: Mapping[str, LayerCosts], rates: Sequence[float], room: Sequence[int] | None = None
) -> list[Pipelines]:
    """The layout under which training ends sooner by `GAIN`: cut by these rates, or as if all devices were alike; else
    as it is.

    `room`: layers of every model that each device has memory for beside what it has; None: as many as there are.
    """
    now = with_layer_counts(layout, costs)
    devices = now[0].devices
    cuts = [now]
    for assumed in ([max(rates[device::devices]) for device in range(devices)], [1.0] * devices):
        cuts.append([_cut(pipelines, costs[pipelines.model], assumed, room) for pipelines in now])
    best = max(cuts, key=lambda cut: _speed(cut, costs, rates))
    return best if _speed(best, costs, rates) > GAIN * _speed(now, costs, rates) else now


def _cut(pipelines: Pipelines, costs: LayerCosts, rates: Sequence[float], room: Sequence[int] | None) -> Pipelines:
    on = [[pipelines.device(p, stage) for p in range(pipelines.pipelines)] for stage in range(pipelines.depth)]
    more = [min(room[each] for each in devices) // pipelines.chunks for devices in on] if room else []
    most = [size + free for size, free in zip(pipelines.layers or (), more, strict=True)] if room else []
    slowest = [max(rates[each] for each in devices) for devices in on]
    return replace(pipelines, layers=pipelines.balanced(costs, slowest, most))


def _speed(layout: Layout, costs: Mapping[str, LayerCosts], rates: Sequence[float]) -> float:
    """Of all blocks together, where each gets the rows that it can take; rounded, so that of equals the first wins."""
    work = device_costs(layout, costs)
    ends = [
        max(rate * own for rate, own in zip(rates[first : first + len(work)], work, strict=True))
        for first in range(0, len(rates), len(work))
    ]
    return float(f"{sum(1 / end for end in ends):.6g}")
