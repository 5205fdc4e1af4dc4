"""The twelve schedule problems published by RLHFuse (arXiv 2409.13221) and their results; backward takes 2x forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlfuse.fusion.schedules.problem import Model, Problem


class Instance(NamedTuple):
    """(actor, critic) stages, micro-batches and forward times; makespans; peak memory relative to serial 1F1B."""

    stages: tuple[int, int]
    micro_batches: tuple[int, int]
    forward: tuple[float, float]
    serial_1f1b: float
    published: float
    lower_bound: float
    published_memory: float


INSTANCES = [
    Instance((8, 4), (32, 16), (5, 4), 813, 708, 708, 1.263),
    Instance((8, 4), (16, 8), (5, 4), 477, 372, 372, 1.010),
    Instance((8, 4), (8, 4), (5, 4), 309, 225, 225, 1.000),
    Instance((8, 8), (32, 32), (5, 2), 819, 702, 702, 1.314),
    Instance((8, 8), (16, 16), (5, 2), 483, 366, 366, 1.189),
    Instance((8, 8), (8, 8), (5, 2), 315, 225, 225, 1.000),
    Instance((16, 8), (64, 32), (2, 2), 708, 618, 618, 1.514),
    Instance((16, 8), (32, 16), (2, 2), 420, 330, 330, 1.139),
    Instance((16, 8), (16, 8), (2, 2), 276, 186, 186, 1.000),
    Instance((16, 16), (64, 64), (2, 1), 711, 613, 606, 1.476),
    Instance((16, 16), (32, 32), (2, 1), 423, 318, 318, 1.226),
    Instance((16, 16), (16, 16), (2, 1), 279, 186, 186, 1.000),
]


def problem(number: int, **fields: Any) -> Problem:
    """Return the problem of an instance; `fields` override fields of its JSON."""
    each = INSTANCES[number]
    devices = each.stages[0]
    actor = {"name": "actor", "activation": 1.95 if number < 6 else 1.64, "direction": "down"}
    critic = {"name": "critic", "activation": 2 if each.stages[1] < devices else 1, "direction": "up"}
    models = [
        model
        | {
            "stages": stages,
            "pipelines": devices // stages,
            "micro_batches": micro_batches,
            "forward": forward,
            "backward": 2 * forward,
        }
        for model, stages, micro_batches, forward in zip(
            (actor, critic), each.stages, each.micro_batches, each.forward, strict=True
        )
    ]
    return parse({"devices": devices, "models": models} | fields)


def parse(data: dict[str, Any]) -> Problem:
    """Return a problem from plain data."""

    def tuples(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    return Problem(**tuples(data) | {"models": tuple(Model(**tuples(each)) for each in data["models"])})
