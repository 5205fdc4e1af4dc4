"""Forecast the time of a step by simulation, with costs predicted from hardware rates or fitted to a recorded run.

A plan search also uses it to compare its best plans, with tuned thresholds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from rlfuse.algorithms.experience import Experience
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.engines.memory.remedies import changed
from rlfuse.errors import UserError
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.schedules.problem import Problem
from rlfuse.simulate.bound import Bound, lower_bound
from rlfuse.simulate.job_step import responses_per_prompt
from rlfuse.simulate.tuning import choose_prefill_share, resample
from rlfuse.simulate.workload import Drawn, Lognormal, Workload
from rlfuse.step.scoring import PASSES
from rlfuse.tools.planning.cluster_file import UNCALIBRATED_ERRORS, Cluster
from rlfuse.tools.planning.hardware import Hardware, WorkSpeed
from rlfuse.tools.planning.search import Plan
from rlfuse.tools.planning.searched_job import Job
from rlfuse.tools.planning.space import POLICY, with_setting
from rlfuse.tools.planning.step_time import MIN_GAIN, Seconds, StepTimes, simulated_seconds, slowest_node_costs
from rlfuse.tools.simulate.recorded import Recording

LENGTH_SIGMA = 0.6  # sigma of log-lengths if no run is given
HALVINGS = 20  # bisection steps: the mean of the lengths is then exact to 1e-4
UNLIMITED_BANDWIDTH = 1e18  # bytes per second of a link of unknown speed
REQUIRED_WORK = {"decoding": "generation", "scoring": "scoring", "training": "training"}


class ForecastError(UserError):
    """Insufficient input for a forecast."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds of a step under each policy."""

    steps: Mapping[str, Seconds]  # by policy; that of the job comes first
    errors: Mapping[str, float]  # kind of work -> relative error
    bound: Bound | None = None  # lower bound for any schedule; jobs without pipelines only
    schedule: Problem | None = None  # schedule of one mini-batch; jobs with pipelines only
    disaggregate: str = ""  # effect of `rollout.disaggregate`, with the reason
    lost_overlap: float = 0.0  # seconds lost because training reads the whole batch

    @property
    def seconds(self) -> Seconds:
        return next(iter(self.steps.values()))


def recorded_costs(config: Config, recording: Recording, folder: str) -> Costs:
    """Return the costs fitted to a run, with this job's limits. Raises ForecastError for missing kinds of work."""
    passes = set(Experience(config).kinds) & PASSES.keys()
    unknown = {kind: words for kind, words in REQUIRED_WORK.items() if kind not in recording.fit.accuracy}
    if missing := [words for kind, words in unknown.items() if passes or kind != "scoring"]:
        raise ForecastError(
            f"--from {folder}: the run has no measurements of {' and '.join(missing)}; record a run without pipelines "
            "that finishes two steps, or give --peak-tflops"
        )
    rollout, longest = config.rollout, config.data.max_response_length
    return replace(recording.fit.costs, max_sequences=rollout.max_num_seqs, max_tokens=longest)


def lengths_of(config: Config, mean: float | None, recording: Recording | None = None) -> tuple[int, ...]:
    """Return the response tokens of a step's samples: resampled from the run, else lognormal with this mean, capped at
    data.max_response_length."""
    group, limit = responses_per_prompt(config), config.data.max_response_length
    samples = config.data.train_batch_size * group
    if recording is not None and mean is None:
        seen = [length for step in recording.steps for length in step.workload.lengths().tolist()]
        return tuple(min(limit, length) for length in resample(seen, group, samples, seed=1))
    return tuple(_lengths_with_mean(mean or limit / 2, samples, group, limit).tolist())


def _lengths_with_mean(mean: float, samples: int, group: int, limit: int) -> np.ndarray:
    """Return int64 [samples]: capped lengths whose mean after capping is `mean`."""
    low, high = (0.0, log(limit) + 6 * LENGTH_SIGMA)  # log of the median; at `high` all are capped
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        longer = Drawn(Lognormal(exp(middle), LENGTH_SIGMA), samples, limit).draw(group, 1).mean() >= mean
        low, high = (low, middle) if longer else (middle, high)
    return Drawn(Lognormal(exp(high), LENGTH_SIGMA), samples, limit).draw(group, 1)


def forecast(
    config: Config,
    times: StepTimes,
    costs: Costs,
    errors: Mapping[str, float] = UNCALIBRATED_ERRORS,
    speeds: Sequence[WorkSpeed] = (),
) -> Forecast:
    """Forecast a step with tuned thresholds; pipelines use their initial schedule. `errors`: relative, by kind of work;
    `speeds`: of the nodes, if they differ."""
    workload, training = times.workload(config, costs, speeds)
    steps, whys = {}, list[str]()
    for policy in dict.fromkeys((config.fusion.policy, *POLICIES)):
        steps[policy] = times.simulated(config, costs, speeds, policy, tuned=True)
        settings = times.tuned(workload, policy)
        linked, share, why = _with_disaggregation(config, workload, policy, settings, max(errors.values()))
        if share:
            steps[policy] = simulated_seconds(linked, training, policy, replace(settings, prefill_share=share))
        whys.append(why)
    if config.training.pipeline_parallel_size == 1:
        lost = steps[config.fusion.policy].step - _without_batch_wait(times, workload, config.fusion.policy).step
        return Forecast(steps, errors, bound=lower_bound(workload), disaggregate=whys[0], lost_overlap=lost)
    counts, forward = times.mini_batch(config, slowest_node_costs(costs, speeds))
    schedule = times.planner(config, counts, forward).problem(counts)
    return Forecast(steps, errors, schedule=schedule, disaggregate=whys[0])


def _without_batch_wait(times: StepTimes, workload: Workload, policy: str) -> Seconds:
    training = replace(workload.training, early=True, critic_early=True)
    overlapped = replace(workload, training=training)
    return simulated_seconds(overlapped, 0.0, policy, times.tuned(overlapped, policy))


def _with_disaggregation(
    config: Config, workload: Workload, policy: str, settings: Settings, error: float
) -> tuple[Workload, float, str]:
    """Return the workload with links, the share of prefill-only engines, and the reason for that share."""
    free = not workload.link_bytes_per_s and config.trainer.nnodes == 1
    linked = replace(workload, link_bytes_per_s=UNLIMITED_BANDWIDTH) if free else workload
    found = choose_prefill_share(linked, policy, settings, config.rollout.disaggregate, error)
    why = found.why + ("; copies of KV caches are not counted" if free and "simulated" in found.why else "")
    return linked, found.share, why


def assumptions(
    config: Config,
    machines: Cluster | None,
    hardware: Hardware | None,
    lengths: Sequence[int],
    prompt_tokens: int,
    recording: Recording | None = None,
) -> list[str]:
    """Return a line for each assumption; `machines` and `hardware` are None for the costs of a run."""
    responses = f"responses of {sum(lengths) / len(lengths):.0f} tokens on average, {max(lengths)} at most"
    found = [f"{responses}; prompts of {prompt_tokens} tokens"]
    if recording is not None and recording.rates:
        slowest = f"the slowest took {max(recording.rates):.2f}x the typical time"
        found.append(f"all slots run at the speed of a typical slot of the run; {slowest}")
    if machines is not None and hardware is not None:
        found.append(f"{machines.throughput_note()}; 2 FLOP per parameter and token forward, 4 backward")
        links = hardware.links
        found.append(
            f"bandwidth of a device in GB/s: {hardware.bytes_per_s / 1e9:g} memory (decoding), "
            f"{links.within_bytes_per_s / 1e9:g} within a node, {links.between_bytes_per_s / 1e9:g} between nodes, "
            f"{hardware.host_bytes_per_s / 1e9:g} to the host"
        )
        found.append("reward functions and Ray calls take no time")
    if Experience(config).kinds and config.fusion.data != "exact":
        found.append(f"fusion.data={config.fusion.data} is treated as exact")
    if config.algorithm.filter_groups.enable:
        found.append("dynamic sampling: each step uses one batch of prompts")
    return found


@dataclass(frozen=True, slots=True)
class Finalists:
    """The best plans with tuned thresholds, fastest first."""

    plans: tuple[Plan, ...]  # the first one under its best policy
    policies: Mapping[str, Seconds]  # steps of the first plan under each searched policy
    untuned_plans: int  # number of plans not tuned in time


def finalists(
    job: Job, plans: Sequence[Plan], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Finalists:
    """Tune the first plan, and as many of the others as `seconds` allow."""
    until, tuned = clock() + seconds, list[Plan]()
    best, policies = _under_best_policy(job, plans[0])
    for plan in plans[1:]:
        if clock() >= until:
            break
        config = changed(job.config, plan.settings)
        tuned.append(replace(plan, seconds=job.simulated(config, plan.memory, tuned=True)))
    untuned_plans = len(plans) - 1 - len(tuned)
    tuned.sort(key=lambda plan: plan.seconds.step)
    if tuned and tuned[0].seconds.step < (1 - MIN_GAIN) * best.seconds.step:
        tuned.append(best)
        best, policies = _under_best_policy(job, tuned.pop(0))
        tuned.sort(key=lambda plan: plan.seconds.step)
    return Finalists((best, *tuned), policies, untuned_plans)


def with_untuned_step(job: Job, plan: Plan) -> Plan:
    """Return the plan with the step time under initial settings, which the search compares."""
    return replace(plan, seconds=job.simulated(changed(job.config, plan.settings), plan.memory))


def _under_best_policy(job: Job, plan: Plan) -> tuple[Plan, dict[str, Seconds]]:
    """Return the plan with its fastest policy (the job's, unless another gains MIN_GAIN), and the steps of all."""
    config = changed(job.config, plan.settings)
    errors = job.hardware.errors or UNCALIBRATED_ERRORS
    steps = forecast(config, job.times, job.costs(config, plan.memory), errors, job.speeds(config)).steps
    policies = {policy: steps[policy] for policy in job.axes[POLICY]}
    fastest, given = min(policies, key=lambda policy: policies[policy].step), job.config.fusion.policy
    if given in policies and policies[given].step <= policies[fastest].step * (1 + MIN_GAIN):
        fastest = given
    return replace(plan, settings=with_setting(plan.settings, POLICY, fastest), seconds=policies[fastest]), policies
