"""Adapt pipelines to slow devices: rows per pipeline and expected durations. Pure functions.

Role: called by the group before it distributes rows, and by the trainer when rates change. A rate is time over expected
time, by device of all blocks (block * devices + device). All blocks have the same stages and schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.partition import LayerCosts, stage_costs

Layout = Sequence[Pipelines]


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
