"""How long a step of a plan takes, and what it takes at the least: on a few of its engines, as all are alike.

Role: `search` asks for the bound of many plans and the simulated step of few. Pure but for simulating and tracing.
Invariants: bound and simulation are of the same samples on the same engines; a pipeline's training is the schedule
that a run would start with; equal steps are simulated once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from rlfuse.config.checks import value_of
from rlfuse.config.schema import Config
from rlfuse.fusion.costs import Costs
from rlfuse.fusion.schedules.baselines import serial_1f1b
from rlfuse.planning import hypothetical
from rlfuse.planning.cluster_file import Cluster
from rlfuse.planning.forecast import (
    engine_speeds,
    of_slowest,
    planned,
    stage_shares,
    with_idle_stages,
    without_schedule,
)
from rlfuse.planning.hardware import Hardware
from rlfuse.planning.memory import Memory, problems
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.remedies import Setting, changed
from rlfuse.planning.space import CACHE, POLICY, Axes
from rlfuse.planning.tracing import Work
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.recorded import workload_of
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.speed import some_of
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Workload

MOST_ENGINES, MOST_SAMPLES = 8, 384
"""That are simulated of a plan's, at the same number of samples for each, where that is possible."""
FEW_PROMPTS, NEAR = 16, 0.02
"""That are simulated at least, as few are shorter or longer than all; by which share samples for each may be off."""
NOTHING_TO_TRAIN = 1e15
"""Tokens per second, where training is a schedule of its own."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of a step."""

    generating: float
    scoring: float
    """After the last sample was whole."""
    training: float
    """After that, with changes of role and weights to the engines."""

    @property
    def step(self) -> float:
        return self.generating + self.scoring + self.training

    @property
    def kinds(self) -> dict[str, float]:
        """By the names of `hardware.KINDS`."""
        return {"generating": self.generating, "scoring": self.scoring, "training": self.training}


@dataclass(frozen=True)
class Job:
    """What plans are looked for."""

    config: Config
    shapes: Mapping[str, Shape]
    served: Mapping[str, Shape]
    cluster: Cluster
    hardware: Hardware
    lengths: tuple[int, ...]
    prompt_tokens: int
    axes: Axes
    _lean: dict[str, Shape] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lean", _without_passes(self.shapes))

    @functools.cached_property
    def times(self) -> StepTimes:
        """What was simulated is not simulated again."""
        return StepTimes(self)

    def lean(self, settings: Iterable[Setting]) -> tuple[Config, Memory]:
        """With the largest cache that fits, and memory without activations: no plan needs less."""
        return self._sized(settings, self._lean)

    def sized(self, settings: Iterable[Setting]) -> tuple[Config, Memory]:
        """With the largest cache that fits, and all of its memory."""
        return self._sized(settings, self.shapes)

    def with_settings(self, settings: Iterable[Setting]) -> tuple[Config, Memory]:
        """As the settings say, and all of its memory."""
        config = changed(self.config, settings)
        return config, self._memory(config, self.shapes)

    def _sized(self, settings: Iterable[Setting], shapes: Mapping[str, Shape]) -> tuple[Config, Memory]:
        key, found = CACHE[self.cluster.device], []
        for size in self.axes[key]:
            config = changed(self.config, (*settings, (key, size)))
            found.append((config, self._memory(config, shapes)))
            if not problems(*found[-1]):
                return found[-1]
        return min(found, key=lambda each: max(map(each[1].total, each[1].phases)))

    def _memory(self, config: Config, shapes: Mapping[str, Shape]) -> Memory:
        return hypothetical.memory(
            config, shapes, self.cluster.budget(config.trainer.nnodes), self.served, self.hardware
        )

    def settings_of(self, config: Config, settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
        """With those of cache and policy."""
        return *settings, *((key, value_of(config, key)) for key in (CACHE[self.cluster.device], POLICY))


def _without_passes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Models whose passes leave nothing."""

    @functools.cache
    def lean(shape: Shape) -> Shape:
        nothing = Work(0, (0,) * len(shape.layers), 0, 0)
        return replace(shape, model=SimpleNamespace(model=shape.model.model, work=lambda *_: nothing))

    return {role: lean(shape) for role, shape in shapes.items()}


class StepTimes:
    """Of the plans of one job."""

    def __init__(self, job: Job):
        self._job = job
        self._simulated: dict[tuple, Seconds] = {}
        self._schedules: dict[tuple, float] = {}
        """How many times as long as without bubbles."""
        self._bounds: dict[Workload, float] = {}
        self._context = job.prompt_tokens + sum(job.lengths) / len(job.lengths)

    def bound(self, config: Config, memory: Memory, roomy: bool = False) -> float:
        """No schedule takes less. `roomy`: whatever the engine's cache, and micro-batches in number."""
        workload, training = self._workload(config, memory, roomy, schedule=False)
        if workload not in self._bounds:
            self._bounds[workload] = lower_bound(workload).seconds
        return self._bounds[workload] + training

    def simulated(self, config: Config, memory: Memory, policy: str | None = None, tuned: bool = False) -> Seconds:
        """A step under a policy or the job's, as a run starts; `tuned`: as it goes on, where simulating is quick."""
        policy = policy or config.fusion.policy
        workload, training = self._workload(config, memory)
        key = (workload, training, policy, tuned)
        if key not in self._simulated:
            settings = tune(workload, policy) if tuned and workload.samples <= MOST_SAMPLES else None
            result = simulate(workload, policy, settings).result
            scored = result.generation_and_scoring_s
            self._simulated[key] = Seconds(
                result.generation_s, scored - result.generation_s, result.step_s - scored + training
            )
        return self._simulated[key]

    def _workload(
        self, config: Config, memory: Memory, roomy: bool = False, schedule: bool = True
    ) -> tuple[Workload, float]:
        """What is simulated, and the seconds of training that are not part of it; without a `schedule` the least."""
        job = self._job
        costs = hypothetical.costs(config, job.shapes, job.hardware, self._context, memory.moved)
        if not roomy:
            costs = with_idle_stages(hypothetical.as_one(config), costs, job.lengths, job.prompt_tokens)
        ample = config.rollout.max_num_seqs * (job.prompt_tokens + max(job.lengths))
        tokens = ample if roomy else max(1, min(memory.kv_tokens, ample))
        workload = self._some_engines(config, replace(costs, kv_tokens=tokens))
        training = 0.0
        if config.training.pipeline_parallel_size > 1:
            training = self._pipeline_s(config, workload, costs, schedule, roomy)
            free = replace(workload.training, tokens_per_s=NOTHING_TO_TRAIN, call_s=0.0, optimizer_s=0.0)
            workload = replace(workload, training=free)
        return workload, training

    def _pipeline_s(self, config: Config, workload: Workload, costs: Costs, schedule: bool, roomy: bool) -> float:
        """Of all mini-batches. Durations of a schedule's operations are in proportion, so it is searched once.

        `roomy`: without bubbles, which more and smaller micro-batches make as short as one likes. One model whose
        backward is whole has 1F1B: its fullest stage works all the time but while the first and last micro-batch are
        in the others.
        """
        job, stages = self._job, config.training.pipeline_parallel_size
        tensor = hypothetical.of(config).tensor_parallel_size
        group = of_slowest(costs, job.cluster.speeds(config.trainer.nnodes))
        group = replace(group, train_tokens_per_s=group.train_tokens_per_s * tensor)
        planner, counts, forward = planned(
            hypothetical.as_one(config), job.shapes, group, job.lengths, job.prompt_tokens
        )
        seconds = 3 * forward * sum(counts.values()) / stages
        alone = len(counts) == 1 and not config.training.split_backward
        if schedule:
            key = (stages, config.fusion.training, tuple(counts.items()))
            if key not in self._schedules:
                took = serial_1f1b(planner.problem(counts)) if alone else planner.plan(counts).seconds
                self._schedules[key] = took / seconds
            seconds *= self._schedules[key]
        elif alone and not roomy:
            fullest = max(stage_shares(job.shapes["actor"], stages))
            seconds = 3 * forward * ((counts["actor"] - 1) * fullest + 1)
        steps, models = workload.training.mini_batches * workload.training.epochs, len(workload.training.models)
        return steps * (seconds + models * costs.optimizer_s)

    def _some_engines(self, config: Config, costs: Costs) -> Workload:
        """A step on fewer engines, with as many samples for each; of uneven machines some of each."""
        width, rows = config.rollout.tensor_model_parallel_size, config.rollout.n
        batch, mini_batch = config.data.train_batch_size, config.actor.ppo_mini_batch_size
        mini_batches = -(-batch // mini_batch)
        engines, prompts = cut(config.slots // width, mini_batch, mini_batches, rows)
        lengths = self._lengths(rows, prompts * mini_batches)
        workload = without_schedule(workload_of(config, costs, engines, lengths, self._job.prompt_tokens))
        some = some_of(engine_speeds(config, self._job.cluster.speeds(config.trainer.nnodes)), engines)
        return replace(workload, training=replace(workload.training, mini_batches=mini_batches), slot_speed=some)

    @functools.cache  # noqa: B019, as long as the search
    def _lengths(self, group: int, prompts: int) -> tuple[int, ...]:
        """Of so many prompts, spread over all from the shortest to the longest: few have the same tail as many."""
        groups = np.array(self._job.lengths).reshape(-1, group)
        spread = np.linspace(len(groups) - 1, 0, prompts).round().astype(int)
        some = groups[np.argsort(groups.max(axis=1), kind="stable")[spread]]
        return tuple(np.random.default_rng(1).permutation(some).ravel().tolist())


def cut(engines: int, mini_batch: int, mini_batches: int, rows: int) -> tuple[int, int]:
    """How many engines, and prompts of each mini-batch, are enough of a step to be simulated: as many for each engine.

    `rows` of each prompt. No mini-batch is left out; all are taken where no smaller number is in proportion.
    """
    each = mini_batch * mini_batches * rows / engines
    most = min(engines, MOST_ENGINES, max(2, MOST_SAMPLES // each))
    for prompts in range(-(-FEW_PROMPTS // mini_batches), mini_batch):
        some = engines * prompts / mini_batch
        if some >= most and abs(round(some) - some) <= NEAR * some:
            return round(some), prompts
    return engines, mini_batch
