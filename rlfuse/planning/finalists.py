"""Tune the thresholds of the best plans, so that their steps are those that `rlfuse plan` forecasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlfuse.planning.cluster_file import UNMEASURED
from rlfuse.planning.forecast import forecast
from rlfuse.planning.remedies import changed
from rlfuse.planning.search import Plan
from rlfuse.planning.searched_job import Job
from rlfuse.planning.space import POLICY, but_for
from rlfuse.planning.step_time import NOTHING, Seconds


@dataclass(frozen=True, slots=True)
class Finalists:
    """Plans, the fastest first, with tuned thresholds."""

    plans: tuple[Plan, ...]  # the first one with the policy that is best for it
    policies: Mapping[str, Seconds]  # steps of the first under each policy that may be chosen
    left_out: int  # plans that could not be tuned in time


def finalists(
    job: Job, plans: Sequence[Plan], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Finalists:
    """Tune the first plan, and of the others as many as `seconds` allow."""
    until, tuned = clock() + seconds, list[Plan]()
    best, policies = _under_best_policy(job, plans[0])
    for plan in plans[1:]:
        if clock() >= until:
            break
        config = changed(job.config, plan.settings)
        tuned.append(replace(plan, seconds=job.simulated(config, plan.memory, tuned=True)))
    left_out = len(plans) - 1 - len(tuned)
    tuned.sort(key=lambda plan: plan.seconds.step)
    if tuned and tuned[0].seconds.step < (1 - NOTHING) * best.seconds.step:
        tuned.append(best)
        best, policies = _under_best_policy(job, tuned.pop(0))
        tuned.sort(key=lambda plan: plan.seconds.step)
    return Finalists((best, *tuned), policies, left_out)


def untuned(job: Job, plan: Plan) -> Plan:
    """Return the plan with the step that a run starts with, which the search compares."""
    return replace(plan, seconds=job.simulated(changed(job.config, plan.settings), plan.memory))


def _under_best_policy(job: Job, plan: Plan) -> tuple[Plan, dict[str, Seconds]]:
    """The plan with its fastest policy, the job's own where that is as fast but for next to nothing; all policies."""
    config = changed(job.config, plan.settings)
    errors = job.hardware.errors or UNMEASURED
    steps = forecast(config, job.times, job.costs(config, plan.memory), errors, job.speeds(config)).steps
    policies = {policy: steps[policy] for policy in job.axes[POLICY]}
    fastest, given = min(policies, key=lambda policy: policies[policy].step), job.config.fusion.policy
    if given in policies and policies[given].step <= policies[fastest].step * (1 + NOTHING):
        fastest = given
    return replace(plan, settings=but_for(plan.settings, POLICY, fastest), seconds=policies[fastest]), policies
