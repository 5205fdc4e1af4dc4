"""Answer what-if questions by replay with other durations, or by simulation where decisions would change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np

from rlfuse.config.schema import Config
from rlfuse.events import Span
from rlfuse.fusion.decisions import Settings
from rlfuse.health.detection import Alarm
from rlfuse.health.monitor import read_alarms
from rlfuse.run_folder.reader import RunFolder
from rlfuse.simulate.runner import simulate_later_step
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import Workload
from rlfuse.tools.run_code import policy_code, refuse_code
from rlfuse.tools.simulate.recorded import config_of, fit_run, recorded_workload
from rlfuse.tools.whatif.causes import SLOW_RATE
from rlfuse.tools.whatif.run_operations import COMMUNICATION, KINDS, REWARD, operations, recorded_steps
from rlfuse.tools.whatif.slowdown import COMBINED_KINDS, SLOWEST, Job, JobSlowdown, Run, RunSlowdown, slowest

SIMULATED = 3  # steps, the last of the run
LONGEST = 0.05  # of the responses


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, and what a step would take."""

    question: str
    seconds: float  # of a step in the mean
    change: float  # over the step as it was, less 1
    by: str  # `replay` or `simulation`


def answers(
    run: Run, simulated: Simulated | None, without: Sequence[str] = (), policies: Sequence[str] = ()
) -> Iterator[Answer]:
    """Answer the standard questions, and what a step would take without these kinds of work and under these policies.
    `simulated=None` skips what needs simulation. Raises PolicyError for a policy that cannot be used."""
    kinds = {"rewards take no time": ([REWARD], 0.0), "links twice as fast": (COMMUNICATION, 0.5)}
    for question, (names, factor) in (kinds | {f"{kind} takes no time": ([kind], 0.0) for kind in without}).items():
        yield _replayed(run, question, np.where(run.operations.has_kind(*names), factor * run.own, run.own))
    if simulated is None:
        return
    asked: list[tuple[str, Callable[[Workload], Workload], str]] = [
        ("without the longest 5 % of responses", _without_longest, simulated.policy),
        ("one more slot", _with_another_slot, simulated.policy),
        *((f"policy={policy}", _as_it_was, policy) for policy in policies),
    ]
    for question, change, policy in asked:
        ratio = simulated.seconds(change, policy) / simulated.seconds(_as_it_was)
        yield Answer(question, run.seconds * ratio, ratio - 1, "simulation")


def job_answers(job: Job, found: JobSlowdown, without: Sequence[str] = ()) -> Iterator[Answer]:
    """Answer the standard questions about a training job, and what it would take without these kinds of operation."""
    operations = job.operations
    if found.workers is not None:
        part = slowest(operations, np.array(found.workers))
        yield _replayed(job, f"slowest {SLOWEST:.0%} of the workers like the others", job.without(part))
    if len(operations.pairs):
        yield _replayed(job, "all micro-batches alike", job.even)
    if operations.stages > 1:
        yield _replayed(job, "last stage like the others", job.without(operations.stage == operations.stages - 1))
    yield _replayed(job, "links twice as fast", np.where(operations.communicates, job.own / 2, job.own))
    for kind in without:
        part = operations.has_kind(*COMBINED_KINDS.get(kind, (kind,)))
        yield _replayed(job, f"{kind} takes no time", np.where(part, 0.0, job.own))


def _replayed(analysis: Job | Run, question: str, durations: np.ndarray) -> Answer:
    seconds = analysis.mean(durations)
    return Answer(question, seconds, seconds / analysis.seconds - 1, "replay")


class Simulated:
    """Recorded steps on a virtual clock, under the run's own policy or another."""

    def __init__(self, workloads: Sequence[Workload], policy: str, use_measured_rates: bool = True):
        self.workloads, self.policy, self._by_rates = workloads, policy, use_measured_rates
        self._settings: Callable[[str], Settings] = cache(lambda name: tune(workloads[-1], name))

    def seconds(self, change: Callable[[Workload], Workload], policy: str = "") -> float:
        settings = self._settings(policy or self.policy)
        steps = [
            simulate_later_step(change(each), policy or self.policy, settings, self._by_rates)
            for each in self.workloads
        ]
        return fmean(step.result.step_s for step in steps)

    def resimulated_ratio(self, rates: Mapping[str, float]) -> float | None:
        """Return the ratio that `Run.found` needs; None where no slot is slow."""
        slots = [max(rate, 1.0) for worker, rate in rates.items() if worker.startswith("slot ")]
        if max(slots) < SLOW_RATE:
            return None
        speeds = tuple(1 / rate for rate in slots)
        slow = self.seconds(lambda workload: replace(workload, slot_speed=speeds))
        return slow / self.seconds(lambda workload: replace(workload, slot_speed=()))


def ranks_of(spans: Sequence[Span]) -> set[str]:
    """The trainer's, in a step or more."""
    return {span.where for span in spans if span.kind == "optimizer"}


def simulated(config: Config, steps: Sequence[tuple[Span, Sequence[Span]]]) -> Simulated | None:
    """Return the last of these steps; None for jobs that are not simulated (pipelines, nothing generated) and for a
    configuration of other devices, with which the run was resumed."""
    spans = [span for _, inside in steps for span in inside]
    generated = any(span.kind == "generate" for span in spans)
    if not generated or len(ranks_of(spans)) != config.slots or config.training.pipeline_parallel_size > 1:
        return None
    fitted, rates = fit_run(config, spans)
    workloads = [recorded_workload(config, fitted.costs, rates, inside) for _, inside in steps[-SIMULATED:]]
    return Simulated(workloads, config.fusion.policy, not config.trainer.deterministic)


def _as_it_was(workload: Workload) -> Workload:
    return workload


def _with_another_slot(workload: Workload) -> Workload:
    speeds = (*workload.slot_speed, 1.0) if workload.slot_speed else ()
    return replace(workload, slots=workload.slots + 1, slot_speed=speeds)


def _without_longest(workload: Workload) -> Workload:
    lengths = workload.lengths()
    cut = np.minimum(lengths, int(np.quantile(lengths, 1 - LONGEST, method="lower")))
    return replace(workload, response_tokens=tuple(cut.tolist()))


STEPS = 20  # of a run, the last


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """A run's last undisturbed steps, and what was found."""

    steps: list[tuple[Span, list[Span]]]
    analysis: Run
    simulated: Simulated | None
    found: RunSlowdown
    alarms: list[Alarm]  # what the run told of slow and faulty workers itself, and when that began


def analyse_run(run: RunFolder, steps: int = STEPS, run_code: bool = False) -> RunAnalysis:
    """RunError or WorkloadError where the folder doesn't tell enough. Steps on other ranks than the last are left out:
    a run may have been resumed on more devices, or fewer."""
    config, recorded = config_of(file := run.path / "config.yaml"), recorded_steps(run, steps)
    refuse_code(file, policy_code(config.fusion.policy), run_code)
    ranks = ranks_of(recorded[-1][1])
    recorded = [step for step in recorded if ranks_of(step[1]) == ranks]
    spans = [span for _, inside in recorded for span in inside]
    together = ("backward",) if config.sharded_gradients else ()
    together = KINDS if config.sharded_weights else together
    analysis = Run(operations(recorded, run.width, together), spans)
    clock = simulated(config, recorded)
    found = analysis.found() if clock is None else analysis.found(clock.resimulated_ratio)
    return RunAnalysis(recorded, analysis, clock, found, read_alarms(run.path))
