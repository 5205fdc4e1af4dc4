"""How long a step would take: the run's own simulator, on costs from a model's shape and stated rates, or from a run.

Role: `rlfuse plan` shows the forecast with what it assumes. Pure but for simulating.
Invariants: rates are given, never guessed silently; what a rate does not tell (ZeRO's communication, Ray, rewards,
pushing weights) is named and left out. Costs of a run that never did a kind of work are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlfuse.algorithms.experience import Experience
from rlfuse.config.schema import Config
from rlfuse.engines.scoring import PASSES
from rlfuse.errors import UserError
from rlfuse.fusion.costs import Costs
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.schedules.operations import Kind, Operation
from rlfuse.fusion.schedules.planning import Planner
from rlfuse.fusion.schedules.problem import Problem
from rlfuse.planning.activations import stage_parts
from rlfuse.planning.cluster_file import UNMEASURED
from rlfuse.planning.hardware import Hardware, Links
from rlfuse.planning.model_sizes import Shape
from rlfuse.simulate.prefill_share import find
from rlfuse.simulate.recorded import Recording, micro_batches, workload_of
from rlfuse.simulate.runner import Result, simulate
from rlfuse.simulate.tuning import MOST_SAMPLES, resample, tune
from rlfuse.simulate.workload import Drawn, Lognormal, Workload

SPREAD = 0.6
"""Sigma of log-lengths where no run tells them."""
UNCOUNTED = 1e18
"""Bytes per second of a link that nothing tells of."""
WANTED = {"decoding": "generates", "scoring": "scores", "training": "trains"}


class ForecastError(UserError):
    """Nothing to forecast from; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step under the job's policy, and how long it takes under each."""

    result: Result
    """Of the job's policy, whole models trained."""
    training_s: float
    """Of the job's policy, after what it scored: part of its step."""
    steps: Mapping[str, float]
    """Policy -> seconds; the job's comes first."""
    schedule: Problem | None = None
    """Of one mini-batch, where the job has pipelines."""
    disaggregate: str = ""
    """What `rollout.disaggregate` comes to, and why."""

    @property
    def step_s(self) -> float:
        """Under the job's policy."""
        return next(iter(self.steps.values()))


def recorded_costs(config: Config, recording: Recording, folder: str) -> Costs:
    """What a run measured, under this job's limits. Raises ForecastError for work of the job's that it did not do."""
    passes = set(Experience(config).kinds) & PASSES.keys()
    unknown = {kind: words for kind, words in WANTED.items() if kind not in recording.fit.accuracy}
    if missing := [words for kind, words in unknown.items() if passes or kind != "scoring"]:
        raise ForecastError(
            f"--from {folder}: the run's events don't tell how long it {' and '.join(missing)}; record a run without "
            "pipelines that finishes two steps, or give --tflops"
        )
    rollout, longest = config.rollout, config.data.max_response_length
    return replace(recording.fit.costs, max_sequences=rollout.max_num_seqs, max_tokens=longest)


def lengths_of(config: Config, mean: float | None, recording: Recording | None = None) -> tuple[int, ...]:
    """Response tokens of a step's samples: as the run's, else lognormal around `mean`, none above the limit."""
    group, limit = config.rollout.n, config.data.max_response_length
    samples = config.data.train_batch_size * group
    if recording is not None and mean is None:
        seen = [length for step in recording.steps for length in step.workload.lengths().tolist()]
        return tuple(min(limit, length) for length in resample(seen, group, samples, seed=1))
    median = max(1.0, (mean or limit / 2) * 2.718281828 ** (-(SPREAD**2) / 2))
    return tuple(Drawn(Lognormal(median, SPREAD), samples, limit).draw(group, 1).tolist())


def forecast(
    config: Config,
    shapes: Mapping[str, Shape],
    costs: Costs,
    lengths: Sequence[int],
    prompt_tokens: int,
    error: float = UNMEASURED,
    speeds: Sequence[float] = (),
) -> Forecast:
    """Simulate one step; where the job has pipelines, training is the schedule that a run would start with.

    `error`: part of a step that the costs may be wrong by; `speeds`: of the nodes, where they differ.
    """
    engines = config.slots // config.rollout.tensor_model_parallel_size
    costs = with_idle_stages(config, costs, lengths, prompt_tokens)
    workload = without_schedule(workload_of(config, costs, engines, lengths, prompt_tokens))
    workload = replace(workload, slot_speed=engine_speeds(config, speeds))
    results, tuned = {}, {}
    for policy in dict.fromkeys((config.fusion.policy, *POLICIES)):
        tuned[policy] = tune(workload, policy) if workload.samples <= MOST_SAMPLES else Settings()
        results[policy] = simulate(workload, policy, tuned[policy]).result
    result, why = _disaggregated(config, workload, tuned[config.fusion.policy], error)
    if result is not None:
        results[config.fusion.policy] = result
    mine = results[config.fusion.policy]
    if config.training.pipeline_parallel_size == 1:
        training = mine.step_s - mine.generation_and_scoring_s - costs.step_s
        steps = {policy: each.step_s for policy, each in results.items()}
        return Forecast(mine, training, steps, disaggregate=why)
    planner, counts, _ = planned(config, shapes, of_slowest(costs, speeds), lengths, prompt_tokens)
    mini_batches = workload.training.mini_batches * workload.training.epochs
    optimizers = len(workload.training.models) * costs.optimizer_s
    training = mini_batches * (planner.plan(counts).seconds + optimizers)
    steps = {policy: each.generation_and_scoring_s + training + costs.step_s for policy, each in results.items()}
    return Forecast(mine, training, steps, planner.problem(counts), why)


def engine_speeds(config: Config, nodes: Sequence[float]) -> tuple[float, ...]:
    """Of each engine, by its slowest device; empty where `nodes` has no speeds, as all are alike."""
    width = config.rollout.tensor_model_parallel_size
    devices = [speed for speed in nodes for _ in range(config.trainer.n_gpus_per_node)]
    return tuple(min(devices[at : at + width]) for at in range(0, len(devices), width))


def of_slowest(costs: Costs, nodes: Sequence[float]) -> Costs:
    """Of pipelines, which wait for each other in every mini-batch."""
    return replace(costs, train_tokens_per_s=costs.train_tokens_per_s * min(nodes, default=1.0))


def without_schedule(workload: Workload) -> Workload:
    """All slots still work together, but not in pipelines: what a schedule takes and fills is worked out apart."""
    training, scoring = replace(workload.training, bubbles=None), replace(workload.scoring, deferred=False)
    return replace(workload, training=training, scoring=scoring)


def _disaggregated(config: Config, workload: Workload, settings: Settings, error: float) -> tuple[Result | None, str]:
    """The step, if `rollout.disaggregate` changes it, and what comes of that key."""
    free = not workload.link_bytes_per_s and config.trainer.nnodes == 1
    linked = replace(workload, link_bytes_per_s=UNCOUNTED) if free else workload
    found = find(linked, config.fusion.policy, settings, config.rollout.disaggregate, error)
    why = found.why + ("; copying KV caches is not counted" if free and "simulated" in found.why else "")
    if not found.share:
        return None, why
    return simulate(linked, config.fusion.policy, replace(settings, prefill_share=found.share)).result, why


def planned(
    config: Config, shapes: Mapping[str, Shape], costs: Costs, lengths: Sequence[int], prompt_tokens: int
) -> tuple[Planner, dict[str, int], float]:
    """A planner that knows each operation's duration, how many micro-batches a mini-batch has in a pipeline, and the
    seconds of one's forward pass through all stages."""
    training, width = config.training, config.rollout.tensor_model_parallel_size
    stages = training.pipeline_parallel_size
    planner = Planner(stages, config.fusion.training, training.split_backward, training.activation_memory)
    prompts = config.actor.ppo_mini_batch_size
    count = micro_batches(config, prompts, lengths, prompt_tokens)
    tokens = prompts * config.rollout.n * (sum(lengths) / len(lengths) + prompt_tokens) / (config.slots // stages)
    forward = tokens / count / (costs.train_tokens_per_s / width) / 3
    counts = {}
    for role in ("actor", "critic") if config.uses_critic else ("actor",):
        for stage, share in enumerate(stage_shares(shapes[role], stages)):
            split = training.split_backward and config.fusion.training == "fused"
            kinds: dict[Kind, float] = {"F": 1, "B": 1, "W": 1} if split else {"F": 1, "B": 2}
            for kind, times in kinds.items():
                planner.learn(Operation(role, 0, stage, 0, kind), forward * times * share)
        counts[role] = count
    return planner, counts, forward


def with_idle_stages(config: Config, costs: Costs, lengths: Sequence[int], prompt_tokens: int) -> Costs:
    """Passes of pipelines take longer by what their stages wait for a step's first and last micro-batch."""
    if (stages := config.training.pipeline_parallel_size) == 1:
        return costs
    count = micro_batches(config, config.data.train_batch_size, lengths, prompt_tokens)
    return replace(costs, score_tokens_per_s=costs.score_tokens_per_s * count / (count + stages - 1))


def stage_shares(shape: Shape, stages: int) -> list[float]:
    """Of a forward pass, of each stage."""
    sizes = [sum(shape.layers[i] for i in part.layers) for part in stage_parts(shape, stages)]
    sizes[-1] += shape.head // 2
    return [size / sum(sizes) for size in sizes]


def assumptions(config: Config, hardware: Hardware | None, lengths: Sequence[int], prompt_tokens: int) -> list[str]:
    """What the forecast rests on, a line each."""
    known = f"responses of {sum(lengths) / len(lengths):.0f} tokens in the mean, {max(lengths)} at most; "
    found = [known + f"prompts of {prompt_tokens}"]
    if hardware is not None:
        found.append(
            f"{hardware.train_flops / 1e12:g} TFLOP/s of a device in passes and training, "
            f"{hardware.bytes_per_s / 1e9:g} GB/s of its memory while decoding; 2 FLOP per parameter and token "
            "forward, twice that backward"
        )
        free = "ZeRO's communication, changes of role, " if hardware.links == Links() else ""
        found.append(f"not counted: {free}rewards, calls of Ray")
    if Experience(config).kinds and config.fusion.data != "exact":
        found.append(f"fusion.data={config.fusion.data} is forecast as if it were exact")
    if config.algorithm.filter_groups.max_num_gen_batches:
        found.append("dynamic sampling: a step of one batch of prompts")
    return found
