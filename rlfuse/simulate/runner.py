"""Simulate one training step: the real controller, board and policy on simulated engines.

Every run is audited: each sample must be generated once, scored once per kind and trained on once per epoch.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlfuse.config.schema import Config
from rlfuse.costs.rates import Rates
from rlfuse.errors import FunctionError
from rlfuse.events import Recorder, Span
from rlfuse.fusion.board import Board
from rlfuse.fusion.custom_policies import load_policy
from rlfuse.fusion.decisions import Policy, Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.selection import Selection
from rlfuse.fusion.tuning import Tuning
from rlfuse.protocols import Engines, Recorded
from rlfuse.samples import Group, Prompt, Sample, make_groups
from rlfuse.simulate.batching import Batch, SimulationError
from rlfuse.simulate.bound import Bound, lower_bound
from rlfuse.simulate.clock import run_virtual
from rlfuse.simulate.devices import SimulatedReward, SimulatedStages, SimulatedTrainer, SimulatedWeights
from rlfuse.simulate.rollout import Device, SimulatedRollout, Zeros
from rlfuse.simulate.workload import MAX_SECONDS, Workload, WorkloadError
from rlfuse.step.advantages import Advantages
from rlfuse.step.agreement import Agreement
from rlfuse.step.controller import Controller
from rlfuse.step.draining import Draining
from rlfuse.step.groups import GroupSource
from rlfuse.stopping import Stopping

WORKING = ("decode", "old_log_prob", "ref", "values", "backward", "optimizer")
"""Kinds of spans in which a slot is busy; switching roles does not count."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a simulated step. Times are in virtual seconds from its start."""

    policy: str
    generation_s: float  # until the last sample finished
    generation_and_scoring_s: float
    step_s: float
    oracle_s: float  # lower bound of any on-policy schedule (`bound`)
    busy_share: float  # share of all slots' time spent generating, scoring or training
    moved_samples: int
    moved_bytes: float
    samples_finished: int
    bound_by: str
    cpu_s: float  # CPU time including simulated engines: an upper limit for the controller

    def as_json(self) -> dict[str, Any]:
        """Return the fields, with seconds rounded to microseconds."""
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Simulated:
    """A result and the spans it was computed from, including that of the step."""

    result: Result
    spans: list[Span]


def simulate(
    workload: Workload, policy: str | Policy, settings: Settings | None = None, rates: Rates | None = None
) -> Simulated:
    """Run one step under a policy, with tuned `settings` and the slots' `rates` of the previous step.

    Raises WorkloadError for a step that is too long, FunctionError for a policy that cannot be used, and
    SimulationError if an invariant of the machine is violated.
    """
    began = time.process_time()
    bound = lower_bound(workload)
    if bound.seconds > MAX_SECONDS:
        raise WorkloadError(
            f"the step takes at least {bound.seconds:.3g} s (bound by {bound.bound_by}), the maximum is "
            f"{MAX_SECONDS:,} s; raise rates (tokens_per_s, slot_speed) or lower times (..._s)"
        )
    machine, policy = Machine(workload), load_policy(policy) if isinstance(policy, str) else policy
    with _gc_disabled():
        settings = workload.settings(settings or Settings())
        spans = _spans(machine, policy, settings, rates or Rates(workload.slots))
    machine.audit(spans)
    cpu_s = time.process_time() - began
    return Simulated(_result(workload, policy.__name__, machine, bound, spans, cpu_s), spans)


def simulate_later_step(
    workload: Workload, policy: str | Policy, settings: Settings | None = None, use_measured_rates: bool = True
) -> Simulated:
    """Simulate a step after steps that measured `slot_speed`; `use_measured_rates=False` ignores the measured rates."""
    rates = Rates(workload.slots, measured=False)
    if use_measured_rates:
        rates = Rates.of(workload.slot_speed) if workload.slot_speed else Rates(workload.slots)
    return simulate(workload, policy, settings, rates)


def _spans(machine: Machine, policy: Policy, settings: Settings, rates: Rates) -> list[Span]:
    """Return the spans of the step. A FunctionError is raised without the exception group of the cancelled tasks."""
    try:
        return run_virtual(machine.run(policy, settings, rates))
    except BaseExceptionGroup as group:
        error: BaseException | None = group.subgroup(FunctionError)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error or group from None


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection: objects of a step live until its end, and scanning them costs a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _result(
    workload: Workload, policy: str, machine: Machine, bound: Bound, spans: Sequence[Span], cpu_s: float
) -> Result:
    step = next(span for span in spans if span.kind == "step")
    generated = [span.end for span in spans if span.kind == "generate"]
    scored = [span.end for span in spans if span.kind in workload.scoring.kinds]
    busy = sum(span.seconds for span in spans if span.kind in WORKING and span.where != "driver")
    return Result(
        policy,
        max(generated) - step.start,
        max(generated + scored) - step.start,
        step.seconds,
        bound.seconds,
        busy / (workload.slots * step.seconds),
        sum(rollout.moved.samples for rollout in machine.rollouts),
        sum(rollout.moved.bytes for rollout in machine.rollouts),
        len(generated),
        bound.bound_by,
        cpu_s,
    )


class Machine:
    """Simulated engines for one workload, with the other objects that the controller needs."""

    def __init__(self, workload: Workload):
        self.workload, self.costs = workload, workload.costs()
        self.lengths = workload.lengths().tolist()
        zeros = Zeros(workload.longest)
        # The step starts after the first weight update.
        speeds = [speed.later(workload.step_s) for speed in workload.speeds()]
        decoding = workload.decode_speed or (1.0,) * workload.slots
        devices = [
            Device(index, speed, speed.times(factor))
            for index, (speed, factor) in enumerate(zip(speeds, decoding, strict=True))
        ]
        self.rollouts = [SimulatedRollout(device, Batch(self.costs), self._length_of, zeros) for device in devices]
        self.trainer, self.reward = self._trainer(devices, zeros), SimulatedReward()
        weights = SimulatedWeights(self.rollouts, self.trainer, workload.step_s, workload.restart_s)
        self.engines = Engines(self.rollouts, self.reward, self.trainer, weights)

    def _trainer(self, devices: Sequence[Device], zeros: Zeros) -> SimulatedTrainer:
        by_update, lockstep = self.workload.scoring.by_update, self.workload.lockstep
        if (bubbles := self.workload.training.bubbles) is not None:
            return SimulatedStages(devices, self.costs, zeros, bubbles, by_update)
        return SimulatedTrainer(devices, self.costs, zeros, lockstep == "all", lockstep != "none", by_update)

    def _length_of(self, sample: Sample) -> int:
        return self.lengths[sample.prompt.index * self.workload.group + sample.rollout_index]

    async def run(self, policy: Policy, settings: Settings, rates: Rates) -> list[Span]:
        loop = asyncio.get_running_loop()
        log, config = _Log([*self.rollouts, self.trainer]), self._config(policy.__name__)
        for failure in self.workload.failures:  # the step starts after the first weight update
            loop.call_at(self.workload.step_s + failure.at_s, self.rollouts[failure.slot].fail)
        prompts = _Prompts(self.workload)
        groups = _Groups(
            with_baseline=self.workload.baselines,
            config=config,
            engines=self.engines,
            prompts=prompts,
            selection=Selection("exact", 0.0, self.workload.prompts, prompts),
            recorder=log.recorder,
        )
        tuning = Tuning(self.costs, self._known_lengths(), settings, rates)
        controller = Controller(
            config=config,
            engines=self.engines,
            policy=policy,
            groups=groups,
            advantages=Advantages(
                experience=_Experience(self.workload), groups=groups, metrics=log, failures=log, recorder=log.recorder
            ),
            tuning=tuning,
            draining=Draining(self.engines, tuning),
            journal=log,
            metrics=log,
            checkpoints=_NoCheckpoints(),
            stopping=Stopping(0.0, print),
            total_steps=1,
            clock=loop.time,
        )
        await self.trainer.replan(rates.current)
        await controller.update_weights(0)
        await controller.train(0)
        return log.spans

    def _config(self, policy: str) -> Config:
        workload, config = self.workload, Config()
        config.data.train_batch_size = workload.prompts
        config.rollout.n = workload.group - workload.baselines
        config.data.max_response_length = workload.max_response_tokens
        config.actor.ppo_mini_batch_size = workload.mini_batch_prompts
        config.actor.ppo_epochs = workload.training.epochs
        config.algorithm.adv_estimator = "gae" if "critic" in workload.training.models else "grpo"
        config.trainer.critic_warmup = 0 if "actor" in workload.training.models else 2
        config.trainer.val_before_train, config.trainer.save_freq = False, 0
        config.trainer.n_gpus_per_node, config.fusion.policy = workload.slots, policy
        return config

    def _known_lengths(self) -> Lengths:
        """Return the lengths known from earlier steps: those of each prompt, or the mean over all prompts."""
        lengths, history = Lengths(self.workload.max_response_tokens), self.workload.history()
        if history is None:
            lengths.learn({-1: [float(np.mean(self.lengths))]})
        else:
            lengths.learn({prompt: [length] for prompt, length in enumerate(history.tolist())})
        return lengths

    def audit(self, spans: Sequence[Span]) -> None:
        """Raise SimulationError unless each sample was processed exactly as often as required."""
        generated = Counter(span.samples[0] for span in spans if span.kind == "generate")
        self._audit("generated", generated, 1)
        self._audit("rewarded", self.reward.scored, 1)
        for kind in self.workload.scoring.kinds:
            passes = int(self.workload.passes(kind).sum())
            self._audit(f"scored ({kind})", self.trainer.scored[kind], 1, passes)
        for model in self.workload.training.models:
            trained, epochs = int(self.workload.trained.sum()), self.workload.training.epochs
            self._audit(f"trained on ({model})", self.trainer.trained[model], epochs, trained)

    def _audit(self, what: str, counts: Counter[str], times: int, samples: int | None = None) -> None:
        wrong, all_ = [name for name, count in counts.items() if count != times], self.workload.samples
        if wrong or len(counts) != (all_ if samples is None else samples):
            example = f", {wrong[0]} {counts[wrong[0]]} times" if wrong else ""
            spared = 0 if samples is None else all_ - samples
            raise SimulationError(
                f"{len(counts)} of {all_} samples were {what}{example}; expected: each {times} times"
                + (f", except {spared} that do not need it" if spared else "")
            )


class _VirtualTimeRecorder(Recorder):
    """Recorder of spans in virtual time."""

    @contextmanager
    def span(self, kind: str, **fields: Any) -> Iterator[Span]:
        clock = asyncio.get_running_loop().time
        span = Span(kind, self.where, clock(), step=fields.pop("step", self.step), **fields)
        try:
            yield span
        finally:
            span.end = clock()
            self.add(span)


class _Log:
    """Journal, metrics and failure budget of the controller; keeps only the spans of the step."""

    def __init__(self, engines: Sequence[Recorded]):
        self.recorder, self._engines = _VirtualTimeRecorder("driver"), engines
        self.spans: list[Span] = []

    async def collect(self, step: int) -> list[Span]:
        self.spans += self.recorder.drain()
        for engine in self._engines:
            self.spans += await engine.drain()
        return self.spans

    def add(self, values: Mapping[str, float]) -> None: ...

    def watch(self, board: Board) -> None: ...

    def log_step(self, step: int, board: Board, spans: Sequence[Span]) -> None: ...

    def log_validation(self, step: int, board: Board) -> None: ...

    def log_agreement(self, step: int, agreement: Agreement) -> None: ...

    def check(self, step: int, board: Board) -> None: ...


class _NoCheckpoints:
    step = 0

    def folder(self, step: int) -> Path | None:
        return None

    def is_due(self, step: int) -> bool:
        return False

    def check_disk_space(self, step: int) -> None: ...

    def remember(self, step: int) -> None: ...

    async def write(self, step: int, required: bool = False) -> None: ...

    async def settle(self) -> None: ...

    async def settle_after(self, steps: Awaitable[None]) -> None:
        await steps

    async def publish_written(self) -> None: ...

    def publish(self) -> None: ...


class _Experience:
    """Substitute for `Experience`: gives the required scoring and dependencies, without computing losses."""

    def __init__(self, workload: Workload):
        self.kinds = ("reward", *workload.scoring.kinds)
        self.actor_tensors: tuple[str, ...] = ()
        deferred = workload.scoring.kinds if workload.scoring.deferred else ()
        self.deferred = tuple(kind for kind in deferred if kind != "values")
        self.fused_into_first_update = ("old_log_prob",) if workload.scoring.by_update else ()
        self._training = workload.training

    def can_train_before_batch_completes(self, model: str) -> bool:
        return self._training.early if model == "actor" else self._training.critic_early

    def prepare(self, groups: Sequence[Group]) -> None:
        if "critic" in self._training.models:
            for group in groups:
                for sample in group.samples:
                    sample.tensors |= dict.fromkeys(("values", "returns"), sample.require_response().log_probs)

    def complete(self, groups: Sequence[Group]) -> dict[str, float]:
        return {}

    def mismatch(self, groups: Sequence[Group]) -> dict[str, float]:
        return {}

    def groups_with_nonzero_std(self, groups: Sequence[Group]) -> list[int]:
        return list(range(len(groups)))


@dataclass(kw_only=True)
class _Groups(GroupSource):
    """Source of groups that have baselines if the workload does."""

    with_baseline: bool

    def training_groups(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        return make_groups(prompts, self.config.rollout.n, self.config.data.seed, step, self.with_baseline)


class _Prompts:
    """Prompts of the workload, all in one batch."""

    def __init__(self, workload: Workload):
        tokens = np.zeros(workload.prompt_tokens, np.int32)
        self.prompts = [Prompt(index, tokens, "", (), "", None) for index in range(workload.prompts)]

    def next_batch(self) -> list[Prompt]:
        return self.prompts

    upcoming = next_batch

    def update(self, groups: Sequence[Group]) -> None:
        pass
