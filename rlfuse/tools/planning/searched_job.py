"""The job of a plan search: cached memory, bounds and step times of its plans."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from rlfuse.config.checks import value_of
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.engines.memory.estimate import Memory, Moved, Part, memory_of, models_of
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.remedies import Setting, changed, problems
from rlfuse.engines.memory.tracing import MetaModel, Work
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.costs import NOTHING_MOVED, costs_of, work_speeds
from rlfuse.tools.planning.hardware import Hardware, WorkSpeed
from rlfuse.tools.planning.space import CACHE, POLICY, Axes
from rlfuse.tools.planning.step_time import Seconds, StepTimes

ENGINE_ONLY_KEYS = frozenset({"rollout.max_num_seqs", *CACHE.values(), POLICY})
"""Searched keys that affect only engines and controller, not trainer ranks."""


@dataclass(frozen=True)
class Job:
    """A job to plan for: plans differ from its configuration only in the keys of `axes`."""

    config: Config
    shapes: Mapping[str, Shape]
    served: Mapping[str, Shape]
    cluster: Cluster
    hardware: Hardware
    lengths: tuple[int, ...]
    prompt_tokens: int
    axes: Axes
    _shapes_without_activations: dict[str, Shape] = field(init=False, repr=False)
    _models: dict[tuple, list[Part]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _costs: dict[tuple, Costs] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shapes_without_activations", _without_activations(self.shapes))

    @functools.cached_property
    def times(self) -> StepTimes:
        return StepTimes(self.shapes, self.lengths, self.prompt_tokens)

    def bound(self, config: Config, memory: Memory, roomy: bool = False) -> float:
        return self.times.bound(config, self.costs(config, memory), self.speeds(config), roomy)

    def quick_bound(self, config: Config) -> float:
        return self.times.quick_bound(config, self._costs_of(config), self.speeds(config))

    def simulated(self, config: Config, memory: Memory, policy: str | None = None, tuned: bool = False) -> Seconds:
        return self.times.simulated(config, self.costs(config, memory), self.speeds(config), policy, tuned)

    def costs(self, config: Config, memory: Memory) -> Costs:
        found = self._costs_of(config, memory.moved)
        return replace(found, max_sequences=config.rollout.max_num_seqs, kv_tokens=max(1, memory.kv_tokens))

    def _costs_of(self, config: Config, moved: Moved = NOTHING_MOVED) -> Costs:
        key = (moved, *self._trainer_values(config))
        if key not in self._costs:
            context = self.times.context
            self._costs[key] = costs_of(config, self.shapes, self.hardware, context, moved)
        return self._costs[key]

    def _trainer_values(self, config: Config) -> tuple[object, ...]:
        """Return the values of the searched keys that trainer ranks depend on."""
        return tuple(value_of(config, key) for key in self.axes if key not in ENGINE_ONLY_KEYS)

    def speeds(self, config: Config) -> tuple[WorkSpeed, ...]:
        nodes = self.cluster.speeds(config)
        return work_speeds(config, self.shapes["actor"], self.hardware, nodes, self.times.context)

    def sized_without_activations(self, settings: Iterable[Setting]) -> tuple[Config, Memory]:
        """Return the plan with the largest KV cache that fits without activations: a lower bound of the memory."""
        return self._sized(settings, self._shapes_without_activations)

    def sized(self, settings: Iterable[Setting]) -> tuple[Config, Memory]:
        """Return the plan with the largest KV cache that fits."""
        return self._sized(settings, self.shapes)

    def with_settings(self, settings: Iterable[Setting]) -> tuple[Config, Memory]:
        config = changed(self.config, settings)
        return config, self._memory(config, self.shapes)

    def _sized(self, settings: Iterable[Setting], shapes: Mapping[str, Shape]) -> tuple[Config, Memory]:
        key, found, given = CACHE[self.cluster.device], [], changed(self.config, settings)
        for size in self.axes[key]:
            config = changed(given, [(key, size)])
            found.append((config, self._memory(config, shapes)))
            if not problems(*found[-1]):
                return found[-1]
        return min(found, key=lambda each: max(map(each[1].total, each[1].phases)))

    def _memory(self, config: Config, shapes: Mapping[str, Shape]) -> Memory:
        key = (shapes is self._shapes_without_activations, *self._trainer_values(config))
        if key not in self._models:
            self._models[key] = models_of(config, shapes, self.cluster.device)
        budget = self.cluster.budget(config)
        return memory_of(config, shapes, budget, self.served, self._models[key])

    def settings_of(self, config: Config, settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
        return *settings, *((key, value_of(config, key)) for key in (CACHE[self.cluster.device], POLICY))


def _without_activations(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    def idle(meta: MetaModel) -> SimpleNamespace:
        nothing = Work(0, (0,) * len(meta.stack), 0, 0, 0)
        return SimpleNamespace(
            model=meta.model, stack=meta.stack, work=lambda *_: nothing, share=lambda width: idle(meta.share(width))
        )

    @functools.cache
    def stripped(shape: Shape) -> Shape:
        return replace(shape, model=idle(shape.model))

    return {role: stripped(shape) for role, shape in shapes.items()}
