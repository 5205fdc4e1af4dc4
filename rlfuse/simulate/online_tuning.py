"""Refit costs and retune settings and `rollout.disaggregate` of a real run after each step, by simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from rlfuse.config.schema import Config
from rlfuse.costs.fit import Fit, fit
from rlfuse.costs.model import Costs
from rlfuse.costs.spans import spans_within
from rlfuse.events import Span
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.tuning import Tuning
from rlfuse.simulate.job_step import finished_lengths, responses_per_prompt, workload_of
from rlfuse.simulate.tuning import choose_prefill_share, cost_error, tune
from rlfuse.simulate.workload import Workload

STEPS = 4
DRIFT = 0.2
SHARE = 0.02  # of the run time that tuning may take, except the first time
CALL_S = 0.005  # minimum cost of a call: Ray, driver and policy
MAX_SAMPLES = 2048  # larger steps are scaled down to this size

StepStatistics = tuple[float | None, float, float, float, float]
"""Properties of a step: error of expected lengths (if known), share of skipped samples, mean length, maximum length,
total speed of all slots."""


class OnlineTuning:
    """Tuner of a run. `engines`: number of rollout engines; `say` receives lines about `rollout.disaggregate`."""

    def __init__(self, config: Config, engines: int, say: Callable[[str], object]):
        self._config, self._engines, self._say = config, engines, say
        self._spans: deque[Sequence[Span]] = deque(maxlen=STEPS)
        self._tuned_for: StepStatistics | None = None
        self._tuning_s = self._since_s = 0.0

    def __call__(self, tuning: Tuning, spans: Sequence[Span]) -> None:
        self._spans.append(spans)
        found = fit_costs([span for each in self._spans for span in each], tuning.costs)
        tuning.costs = found.costs
        lengths = tuning.lengths.recorded
        sizes = (float(np.mean(lengths)), float(np.max(lengths)), sum(_speeds(tuning)))
        shape = (tuning.lengths.error, tuning.skipped_share, *sizes)
        self._since_s += _step(spans).seconds
        before, within_budget = self._tuned_for, self._tuning_s <= SHARE * self._since_s
        if before is None or (_drifted(before, shape) and within_budget):
            began = perf_counter()
            tuning.fixed = tune_settings(tuning, self._config.fusion.policy, self._engines, self._config, spans)
            self._disaggregate(tuning, spans, cost_error(found))
            self._tuned_for, self._tuning_s, self._since_s = shape, perf_counter() - began, 0.0

    def _disaggregate(self, tuning: Tuning, spans: Sequence[Span], error: float) -> None:
        """Choose the share of prefill-only engines for the next steps; not with trainer.deterministic."""
        config, mode = self._config, self._config.rollout.disaggregate
        if mode == "off" or config.trainer.deterministic:
            return
        workload = workload_like(tuning, self._engines, config, spans)
        found = choose_prefill_share(workload, config.fusion.policy, tuning.fixed, mode, error)
        tuning.fixed = replace(tuning.fixed, prefill_share=found.share)
        if found.share or mode == "on":
            self._say(f"rollout.disaggregate={mode}: {found.why}")


def _drifted(before: StepStatistics, now: StepStatistics) -> bool:
    (error_before, skipped_before, *others_before), (error, skipped, *others) = before, now
    learned = (error is None) != (error_before is None) or abs((error or 0.0) - (error_before or 0.0)) > DRIFT
    learned |= abs(skipped - skipped_before) > DRIFT
    return learned or any(abs(new / old - 1) > DRIFT for new, old in zip(others, others_before, strict=True))


def _step(spans: Sequence[Span]) -> Span:
    return next(span for span in spans if span.kind == "step")


def _speeds(tuning: Tuning) -> tuple[float, ...]:
    return tuple(1 / rate for rate in tuning.rates.current)


def fit_costs(spans: Sequence[Span], before: Costs) -> Fit:
    """Fit costs to spans, with at least CALL_S for each call."""
    found = fit(spans, before)
    least = {name: max(getattr(found.costs, name), CALL_S) for name in ("score_call_s", "train_call_s")}
    return replace(found, costs=replace(found.costs, **least))


def tune_settings(tuning: Tuning, policy: str, engines: int, config: Config, spans: Sequence[Span]) -> Settings:
    """Return the settings of `tuning`, tuned for this policy on workloads like the step of these spans."""
    best = tune(workload_like(tuning, engines, config, spans), policy, replace(tuning.fixed, prefill_share=0.0))
    return replace(best, prefill_share=tuning.fixed.prefill_share)


def workload_like(tuning: Tuning, engines: int, config: Config, spans: Sequence[Span]) -> Workload:
    """Return the workload of the step of these spans, with the costs and slot rates of `tuning`."""
    # Samples of validation and of the engine/trainer consistency check have other lengths.
    lengths, prompt_tokens = finished_lengths(spans_within(spans, _step(spans)))
    group = responses_per_prompt(config)
    samples = lengths[: max(group, MAX_SAMPLES // group * group)]
    error, skipped = tuning.lengths.error, tuning.skipped_share
    like = workload_of(config, tuning.costs, engines, samples, prompt_tokens, error, skipped)
    return replace(like, slot_speed=_speeds(tuning))
