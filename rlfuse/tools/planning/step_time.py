"""Predict the time of a step, and a lower bound, by simulating a few representative engines."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.engines.memory.activations import head_share, layer_costs, stage_parts
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.pipeline.layout import pipelines_of
from rlfuse.engines.pipeline.partition import logits_fraction, stage_costs
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.schedules.baselines import serial_1f1b
from rlfuse.fusion.schedules.operations import Kind, Operation
from rlfuse.fusion.schedules.planning import Planner, planner_of
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.job_step import micro_batches, responses_per_prompt, workload_of
from rlfuse.simulate.runner import simulate_later_step
from rlfuse.simulate.speed import evenly_spaced
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Workload
from rlfuse.tools.planning.hardware import WorkSpeed

MAX_ENGINES, MAX_SAMPLES = 8, 384  # limits of the simulated part of a step
MIN_PROMPTS, PROPORTION_TOLERANCE = 16, 0.02  # minimum simulated prompts; tolerance of samples per engine
UNLIMITED_KV_TOKENS = 1 << 40  # size of a KV cache that is never full
FREE_TRAINING_RATE = 1e15  # tokens/s; used when a pipeline schedule gives the training time
MIN_GAIN = 0.002  # smallest relative gain that is worth a change


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a step by kind of work."""

    generating: float
    scoring: float  # after the last sample finished
    training: float  # after scoring, with role switches and weight updates

    @property
    def step(self) -> float:
        return self.generating + self.scoring + self.training

    @property
    def kinds(self) -> dict[str, float]:
        return {"generating": self.generating, "scoring": self.scoring, "training": self.training}

    def is_significantly_slower(self, other: Seconds, errors: Mapping[str, float]) -> bool:
        """Return whether this step is slower than the other beyond the errors, which both share."""
        mine, others = self.kinds, other.kinds
        unsure = sum(errors.get(kind, 0.0) * abs(mine[kind] - others[kind]) for kind in mine)
        return self.step - other.step > unsure


def fastest_labels(steps: Mapping[str, Seconds], errors: Mapping[str, float]) -> dict[str, str]:
    """Return labels of the fastest steps, by name; several if they are equal within the errors or MIN_GAIN."""
    best = min(steps.values(), key=lambda each: each.step)
    enough = (1 + MIN_GAIN) * best.step
    first = [
        name for name, each in steps.items() if each.step <= enough or not each.is_significantly_slower(best, errors)
    ]
    return dict.fromkeys(first, "the fastest" if len(first) == 1 else "equal within the error")


class StepTimes:
    """Cached step times of one job with fixed response lengths, for any configuration and costs."""

    def __init__(self, shapes: Mapping[str, Shape], lengths: Sequence[int], prompt_tokens: int):
        self._whole, self._given, self._prompt_tokens = shapes, np.array(lengths), prompt_tokens
        self._longest, self._mean = int(self._given.max()), float(self._given.mean())
        self._simulated: dict[tuple, Seconds] = {}
        self._tuned: dict[tuple[Workload, str], Settings] = {}
        self._schedules: dict[tuple, float] = {}  # time relative to a schedule without bubbles
        self._bounds: dict[Workload, float] = {}

    @property
    def context(self) -> float:
        return self._prompt_tokens + self._mean

    def bound(self, config: Config, costs: Costs, speeds: Sequence[WorkSpeed] = (), roomy: bool = False) -> float:
        """Return a lower bound of the step time for any KV cache; `roomy`: also for any number of micro-batches."""
        costs = replace(costs, kv_tokens=UNLIMITED_KV_TOKENS)
        workload, training = self.workload(config, costs, speeds, roomy, schedule=False)
        if workload not in self._bounds:
            self._bounds[workload] = lower_bound(workload).seconds
        return self._bounds[workload] + training

    def quick_bound(self, config: Config, costs: Costs, speeds: Sequence[WorkSpeed] = ()) -> float:
        """Return a quick lower bound: scoring and training spread over all slots."""
        engines, lengths = self._some(config)
        few = workload_of(config, costs, engines, lengths[: responses_per_prompt(config)], self._prompt_tokens)
        scoring, training = few.scoring, few.training
        token_s, training_s = (len(scoring.kinds) - scoring.by_update) / scoring.tokens_per_s, 0.0
        if config.training.pipeline_parallel_size > 1:
            training_s = self._pipeline_s(config, slowest_node_costs(costs, speeds), schedule=False, roomy=True)
        else:
            token_s += training.epochs * len(training.models) / training.tokens_per_s
        trained = np.array(lengths).reshape(-1, few.group)[:, : config.rollout.n]
        tokens = float(trained.sum() + trained.size * self._prompt_tokens)
        some = evenly_spaced(engine_speeds(config, speeds), engines)
        return tokens * token_s / (sum(speed.compute for speed in some) or engines) + training_s

    def simulated(
        self,
        config: Config,
        costs: Costs,
        speeds: Sequence[WorkSpeed] = (),
        policy: str | None = None,
        tuned: bool = False,
    ) -> Seconds:
        """Simulate a step under a policy (default: the job's), with initial or `tuned` settings."""
        policy = policy or config.fusion.policy
        workload, training = self.workload(config, costs, speeds)
        key = (workload, training, policy, tuned)
        if key not in self._simulated:
            settings = self.tuned(workload, policy) if tuned else Settings()
            self._simulated[key] = simulated_seconds(workload, training, policy, settings)
        return self._simulated[key]

    def tuned(self, workload: Workload, policy: str) -> Settings:
        """Return the policy's tuned settings, or the defaults if the workload is too large to tune on."""
        if workload.samples > MAX_SAMPLES:
            return Settings()
        if (workload, policy) not in self._tuned:
            self._tuned[workload, policy] = tune(workload, policy)
        return self._tuned[workload, policy]

    def workload(
        self, config: Config, costs: Costs, speeds: Sequence[WorkSpeed] = (), roomy: bool = False, schedule: bool = True
    ) -> tuple[Workload, float]:
        """Return the workload to simulate, and the seconds of pipeline training to add to it (of the schedule, or their
        lower bound). `speeds`: of the nodes, if they differ; `costs.kv_tokens`: capacity of the KV cache."""
        ample = config.rollout.max_num_seqs * (self._prompt_tokens + self._longest)
        tokens = ample if roomy else max(1, min(costs.kv_tokens, ample))
        some = replace(costs if roomy else with_idle_stages(config, costs, self.context), kv_tokens=tokens)
        workload = self._some_engines(config, some, speeds)
        training = 0.0
        if config.training.pipeline_parallel_size > 1:
            training = self._pipeline_s(config, slowest_node_costs(costs, speeds), schedule, roomy)
            free = replace(workload.training, tokens_per_s=FREE_TRAINING_RATE, call_s=0.0, optimizer_s=0.0)
            workload = replace(workload, training=free)
        return workload, training

    def _pipeline_s(self, config: Config, costs: Costs, schedule: bool, roomy: bool) -> float:
        """Return the seconds of training all mini-batches. The shape of a schedule does not depend on the speed, so it
        is searched once. Unless `roomy`, the lower bound counts the bubbles of one model with a joint backward: the
        busiest device waits for the first forward to reach its first stage, and as long after its last backward."""
        stages, chunks = config.training.pipeline_parallel_size, config.training.virtual_pipeline_model_parallel_size
        counts, forward = self.mini_batch(config, costs)
        seconds = 3 * forward * sum(counts.values()) / stages
        joint_backward = len(counts) == 1 and not config.training.split_backward
        one_stage_per_device = joint_backward and chunks == 1
        actor = self._held(config, "actor")
        shared = head_share(config, actor)
        if schedule:
            key = (config.fusion.training, *astuple(config.training), *counts.items(), logits_fraction(config.data))
            if key not in self._schedules:
                planner = self.planner(config, counts, 1.0)
                took = (
                    serial_1f1b(planner.problem(counts))
                    if one_stage_per_device and not shared
                    else planner.plan(counts).seconds
                )
                self._schedules[key] = took / (3 * sum(counts.values()) / stages)
            seconds *= self._schedules[key]
        elif one_stage_per_device and not roomy:
            fullest = max(stage_shares(config, actor))
            seconds = 3 * forward * ((counts["actor"] - 1) * fullest + 1 - (stages - 1) * shared)
        elif joint_backward and not roomy:
            shares, pipelines = stage_shares(config, actor), pipelines_of(config, "actor")
            held = [pipelines.stages_on(position) for position in range(stages)]
            busy = [counts["actor"] * sum(shares[i] for i in mine) + sum(shares[: min(mine)]) for mine in held]
            seconds = 3 * forward * max(each - min(mine) * shared for each, mine in zip(busy, held, strict=True))
        steps = mini_batches_per_step(config) * config.actor.ppo_epochs
        return steps * (seconds + len(counts) * costs.optimizer_s)

    def mini_batch(self, config: Config, costs: Costs) -> tuple[dict[str, int], float]:
        """Return the micro-batches of each model in a pipeline, and the seconds of one's forward pass."""
        rate = costs.train_tokens_per_s / config.rollout.tensor_model_parallel_size
        prompts = config.actor.ppo_mini_batch_size
        count = micro_batches(config, prompts, self.context)
        tokens = prompts * config.rollout.n * self.context / (config.slots // config.training.pipeline_parallel_size)
        models = ("actor", "critic") if config.uses_critic else ("actor",)
        return dict.fromkeys(models, count), tokens / count / rate / 3

    def planner(self, config: Config, counts: Mapping[str, int], forward: float) -> Planner:
        planner = planner_of(config)
        kinds: dict[Kind, float] = {"F": 1, "B": 1, "W": 1} if planner.split else {"F": 1, "B": 2}
        for role in counts:
            held = self._held(config, role)
            head = head_share(config, held, role)
            for stage, share in enumerate(stage_shares(config, held, role)):
                own = share - (head if stage < planner.stages else 0.0)
                for kind, times in kinds.items():
                    planner.learn(Operation(role, 0, stage, 0, kind), forward * times * own)
                if head:
                    planner.learn(Operation(role, 0, stage, 0, "H"), 3 * forward * head)
        return planner

    def _held(self, config: Config, role: str) -> Shape:
        return self._whole[role].share(config.training.tensor_model_parallel_size)

    def _some_engines(self, config: Config, costs: Costs, speeds: Sequence[WorkSpeed]) -> Workload:
        engines, lengths = self._some(config)
        workload = workload_of(config, costs, engines, lengths, self._prompt_tokens)
        scoring = replace(workload.scoring, deferred=False)  # the time of a schedule is added separately
        training = replace(workload.training, bubbles=None, mini_batches=mini_batches_per_step(config))
        some = evenly_spaced(engine_speeds(config, speeds), engines)
        compute = tuple(speed.compute for speed in some)
        decode = tuple(speed.decode / speed.compute for speed in some)
        return replace(workload, scoring=scoring, training=training, slot_speed=compute, decode_speed=decode)

    def _some(self, config: Config) -> tuple[int, tuple[int, ...]]:
        all_of_them = config.slots // config.rollout.tensor_model_parallel_size
        rows = responses_per_prompt(config)
        mini_batches = mini_batches_per_step(config)
        engines, prompts = simulated_part(all_of_them, config.actor.ppo_mini_batch_size, mini_batches, rows)
        return engines, self._lengths(rows, prompts * mini_batches)

    @functools.cache  # noqa: B019, lives as long as the search
    def _lengths(self, group: int, prompts: int) -> tuple[int, ...]:
        """Return the lengths of `prompts` prompts, evenly spaced by length so that the tail is kept."""
        groups = self._given.reshape(-1, group)
        if prompts == len(groups):
            return tuple(self._given.tolist())
        spread = np.linspace(len(groups) - 1, 0, prompts).round().astype(int)
        some = groups[np.argsort(groups.max(axis=1), kind="stable")[spread]]
        return tuple(np.random.default_rng(1).permutation(some).ravel().tolist())


def mini_batches_per_step(config: Config) -> int:
    """Return the number of mini-batches per step."""
    return -(-config.data.train_batch_size // config.actor.ppo_mini_batch_size)


def simulated_seconds(workload: Workload, training_s: float, policy: str, settings: Settings) -> Seconds:
    """Simulate a step; `training_s`: seconds of training that are not part of the workload."""
    result = simulate_later_step(workload, policy, settings).result
    scored = result.generation_and_scoring_s
    return Seconds(result.generation_s, scored - result.generation_s, result.step_s - scored + training_s)


def with_idle_stages(config: Config, costs: Costs, context: float) -> Costs:
    """Return the costs with the idle time of pipeline stages in scoring passes."""
    if (stages := config.training.pipeline_parallel_size) == 1:
        return costs
    count = micro_batches(config, config.data.train_batch_size, context)
    return replace(costs, score_tokens_per_s=costs.score_tokens_per_s * count / (count + stages - 1))


def engine_speeds(config: Config, nodes: Sequence[WorkSpeed]) -> tuple[WorkSpeed, ...]:
    """Return the speed of each engine, that of its slowest device; empty if `nodes` is empty."""
    width = config.rollout.tensor_model_parallel_size
    devices = [speed for speed in nodes for _ in range(config.trainer.n_gpus_per_node)]
    engines = [devices[at : at + width] for at in range(0, len(devices), width)]
    return tuple(WorkSpeed(*map(min, zip(*engine, strict=True))) for engine in engines)


def slowest_node_costs(costs: Costs, nodes: Sequence[WorkSpeed]) -> Costs:
    """Return the training costs of the slowest node, for which all pipelines wait in every mini-batch."""
    slowest = min((node.compute for node in nodes), default=1.0)
    return replace(costs, train_tokens_per_s=costs.train_tokens_per_s * slowest)


def stage_shares(config: Config, shape: Shape, role: str = "actor") -> list[float]:
    """Return the share of a forward pass on each stage."""
    found = stage_parts(config, shape, role)
    sizes, sharers = [len(part.layers) for part in found], sum(part.head is not None for part in found)
    costs = stage_costs(sizes, *layer_costs(shape, logits_fraction(config.data)), sharers)
    return [cost / sum(costs) for cost in costs]


@functools.cache
def simulated_part(engines: int, mini_batch: int, mini_batches: int, rows: int) -> tuple[int, int]:
    """Return the (engines, prompts per mini-batch) to simulate, with as many samples per engine as in the whole step;
    all of them if no smaller number keeps that proportion."""
    each = mini_batch * mini_batches * rows / engines
    most = min(engines, MAX_ENGINES, max(2, MAX_SAMPLES // each))
    for prompts in range(-(-MIN_PROMPTS // mini_batches), mini_batch):
        some = engines * prompts / mini_batch
        if some >= most and abs(round(some) - some) <= PROPORTION_TOLERANCE * some:
            return round(some), prompts
    return engines, mini_batch
