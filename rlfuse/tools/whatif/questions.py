"""Answer what-if questions by replay with other durations, or by simulation if the schedule would change."""

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
from rlfuse.tools.whatif import study_trace
from rlfuse.tools.whatif.causes import SLOW_RATE
from rlfuse.tools.whatif.run_operations import COMMUNICATION, KINDS, REWARD, operations, recorded_steps
from rlfuse.tools.whatif.slowdown import COMBINED_KINDS, SLOWEST, Job, JobSlowdown, Run, RunSlowdown, slowest

SIMULATED = 3  # steps, the last of the run
LONGEST = 0.05  # of the responses


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and the resulting step time."""

    question: str
    seconds: float  # mean step time
    change: float  # relative change of the step time
    by: str  # `replay` or `simulation`


def answers(
    run: Run, simulated: Simulated | None, without: Sequence[str] = (), policies: Sequence[str] = ()
) -> Iterator[Answer]:
    """Answer the standard questions, and those about steps without these kinds of work and under these policies.
    `simulated=None` skips questions that need simulation. Raises FunctionError for an unusable policy."""
    kinds = {"rewards take no time": ([REWARD], 0.0), "links 2x faster": (COMMUNICATION, 0.5)}
    for question, (names, factor) in (kinds | {f"{kind} takes no time": ([kind], 0.0) for kind in without}).items():
        yield _replayed(run, question, np.where(run.operations.has_kind(*names), factor * run.durations, run.durations))
    if simulated is None:
        return
    questions: list[tuple[str, Callable[[Workload], Workload], str]] = [
        ("without the longest 5 % of responses", _without_longest, simulated.policy),
        ("one more slot", _with_another_slot, simulated.policy),
        *((f"policy={policy}", _unchanged, policy) for policy in policies),
    ]
    for question, change, policy in questions:
        ratio = simulated.seconds(change, policy) / simulated.seconds(_unchanged)
        yield Answer(question, run.seconds * ratio, ratio - 1, "simulation")


def job_answers(job: Job, found: JobSlowdown, without: Sequence[str] = ()) -> Iterator[Answer]:
    """Answer the standard questions about a training job, and those about steps without these kinds of operations."""
    operations = job.operations
    if found.workers is not None:
        part = slowest(operations, np.array(found.workers))
        yield _replayed(job, f"slowest {SLOWEST:.0%} of workers like the others", job.without(part))
    if len(operations.pairs):
        yield _replayed(job, "all micro-batches equal", job.even)
    if operations.stages > 1:
        yield _replayed(job, "last stage like the others", job.without(operations.stage == operations.stages - 1))
    links = operations.has_kind(*study_trace.COMMUNICATION)
    yield _replayed(job, "links 2x faster", np.where(links, job.durations / 2, job.durations))
    for kind in without:
        part = operations.has_kind(*COMBINED_KINDS.get(kind, (kind,)))
        yield _replayed(job, f"{kind} takes no time", np.where(part, 0.0, job.durations))


def _replayed(analysis: Job | Run, question: str, durations: np.ndarray) -> Answer:
    seconds = analysis.mean(durations)
    return Answer(question, seconds, seconds / analysis.seconds - 1, "replay")


class Simulated:
    """Recorded steps simulated under the run's policy or another one."""

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
        """Return the step time with slow slots over that without, for `Run.slowdown`; None if no slot is slow."""
        slots = [max(rate, 1.0) for worker, rate in rates.items() if worker.startswith("slot ")]
        if max(slots) < SLOW_RATE:
            return None
        speeds = tuple(1 / rate for rate in slots)
        slow = self.seconds(lambda workload: replace(workload, slot_speed=speeds))
        return slow / self.seconds(lambda workload: replace(workload, slot_speed=()))


def ranks_of(spans: Sequence[Span]) -> set[str]:
    """Return the trainer ranks in these spans."""
    return {span.where for span in spans if span.kind == "optimizer"}


def simulated(config: Config, steps: Sequence[tuple[Span, Sequence[Span]]]) -> Simulated | None:
    """Return the last SIMULATED steps. None for jobs that are not simulated (pipelines, no generation), and if the run
    was resumed with another number of slots."""
    spans = [span for _, inside in steps for span in inside]
    generated = any(span.kind == "generate" for span in spans)
    if not generated or len(ranks_of(spans)) != config.slots or config.training.pipeline_parallel_size > 1:
        return None
    fitted, rates = fit_run(config, spans)
    workloads = [recorded_workload(config, fitted.costs, rates, inside) for _, inside in steps[-SIMULATED:]]
    return Simulated(workloads, config.fusion.policy, not config.trainer.deterministic)


def _unchanged(workload: Workload) -> Workload:
    return workload


def _with_another_slot(workload: Workload) -> Workload:
    speeds = (*workload.slot_speed, 1.0) if workload.slot_speed else ()
    return replace(workload, slots=workload.slots + 1, slot_speed=speeds)


def _without_longest(workload: Workload) -> Workload:
    lengths = workload.lengths()
    cut = np.minimum(lengths, int(np.quantile(lengths, 1 - LONGEST, method="lower")))
    return replace(workload, response_tokens=tuple(cut.tolist()))


STEPS = 20  # analysed by default: the last ones of a run


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """Analysis of the last undisturbed steps of a run."""

    steps: list[tuple[Span, list[Span]]]
    analysis: Run
    simulated: Simulated | None
    slowdown: RunSlowdown
    alarms: list[Alarm]  # alarms that the run raised for slow and faulty workers


def analyse_run(run: RunFolder, steps: int = STEPS, run_code: bool = False) -> RunAnalysis:
    """Analyse the last steps of a run. Steps on other ranks than the last step are ignored: a run may be resumed on
    another number of devices. Raises RunError or WorkloadError for insufficient events."""
    config, recorded = config_of(file := run.path / "config.yaml"), recorded_steps(run, steps)
    refuse_code(file, policy_code(config.fusion.policy), run_code)
    ranks = ranks_of(recorded[-1][1])
    recorded = [step for step in recorded if ranks_of(step[1]) == ranks]
    spans = [span for _, inside in recorded for span in inside]
    lockstep = ("backward",) if config.sharded_gradients else ()
    lockstep = KINDS if config.sharded_weights else lockstep
    analysis = Run(operations(recorded, run.width, lockstep), spans)
    clock = simulated(config, recorded)
    found = analysis.slowdown() if clock is None else analysis.slowdown(clock.resimulated_ratio)
    return RunAnalysis(recorded, analysis, clock, found, read_alarms(run.path))
