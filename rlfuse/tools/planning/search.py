"""Search for the fastest plan that fits: best-first by a lower bound on the step time, confirmed by simulation.

A structure (parallelism degrees, ZeRO stage, machines) enters the queue with a quick bound, then with the bound of its
fastest filling (token budget, batch size, recomputation), then with its fillings, which are simulated if they fit. When
a simulated plan is first in the queue, no other plan is faster. `refine` then descends to neighbouring plans.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from rlfuse.config.checks import check, value_of
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import Memory
from rlfuse.engines.memory.remedies import Setting, changed, problems
from rlfuse.tools.planning.searched_job import Job
from rlfuse.tools.planning.space import FASTEST, POLICY, Filling, Fillings, is_structural, structures, with_setting
from rlfuse.tools.planning.step_time import MIN_GAIN, Seconds

SEARCH_SHARE = 0.7  # share of the time before plans are tried under other policies
POLICY_CANDIDATES = 8  # number of plans simulated under every policy
TIMED_OUT, NOT_FASTER = "not evaluated in time", "its lower bound is slower"
Progress, Clock = Callable[[str], None], Callable[[], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that fits, with its memory and predicted step time."""

    settings: tuple[Setting, ...]
    memory: Memory
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: the best plan, then the others by speed, one per simulated structure."""

    plans: tuple[Plan, ...]
    bound_s: float  # lower bound of all plans; 0 if not all structures were bounded
    unexplored: int  # structures and fillings not evaluated in time; 0: complete
    structures: int
    simulated: int
    not_fitting: int
    nearest: tuple[float, tuple[str, ...]] | None = None  # if nothing fits: bytes missing, and the reasons


@dataclass(order=True, slots=True)
class _Entry:
    seconds: float
    nodes: int  # ties: fewest machines first
    number: int
    kind: str = field(compare=False)  # `sketch` of a structure, `structure`, `filling` or `simulated`
    structure: tuple[Setting, ...] = field(compare=False)
    filling: Filling = field(compare=False)


def search(
    job: Job,
    facts: Facts,
    seconds: float,
    report_progress: Progress = lambda _: None,
    patience: float = inf,
    clock: Clock = time.monotonic,
) -> SearchResult:
    """Search for the fastest plan for at most `seconds` of `clock`. `report_progress` receives lines of progress. The
    search ends after `patience` consecutive plans without a gain."""
    return _Search(job, report_progress, clock).run(facts, seconds, patience)


class _Search:
    def __init__(self, job: Job, report_progress: Progress, clock: Clock):
        self._job, self._report, self._clock = job, report_progress, clock
        self._fillings = Fillings(job.axes)
        self._heap: list[_Entry] = []
        self._numbers = count()
        self._plans: list[Plan] = []
        self._bounds: dict[tuple[Setting, ...], float] = {}  # bounds of plans simulated under one policy only
        self._not_fitting, self._nearest = 0, None
        self._structures: dict[tuple[Setting, ...], float] = {}  # minimum missing bytes of each
        self._best_s, self._plans_at_gain = inf, 0  # best step time, and number of plans when it was found
        self._has_unqueued = True  # True until all structures are in the queue
        self._last_report = self._clock()

    def run(self, facts: Facts, seconds: float, patience: float = inf) -> SearchResult:
        now = self._clock()
        looking, until = now + SEARCH_SHARE * seconds, now + seconds
        try:
            self._enter_structures(facts, looking)
            while not self._is_done and self._clock() < looking and len(self._plans) < self._plans_at_gain + patience:
                self._expand_first()
                self._report_regularly()
            if not self._is_done and not self._plans:
                self._simulate_smallest(until)
            self._try_other_policies(until)
        except KeyboardInterrupt:
            if not self._plans:
                raise
        bounds = [entry.seconds for entry in self._heap] + list(self._bounds.values()) + [0.0] * self._has_unqueued
        plans, count = tuple(ranked(self._plans)), len(self._structures)
        return SearchResult(
            plans,
            min(bounds, default=inf),
            self._num_unexplored(),
            count,
            len(self._plans),
            self._not_fitting,
            self._nearest,
        )

    def _enter_structures(self, facts: Facts, until: float) -> None:
        job = self._job
        for settings in structures(job.config, facts, job.axes, job.shapes["actor"], job.cluster):
            if self._heap and self._clock() >= until:
                return
            self._structures[settings] = self._enter_structure(settings)
            self._report_regularly()
        self._has_unqueued = False

    @property
    def _is_done(self) -> bool:
        return not self._has_unqueued and (not self._heap or self._heap[0].kind == "simulated")

    def _num_unexplored(self) -> int:
        return 0 if self._is_done else self._has_unqueued + sum(entry.kind != "simulated" for entry in self._heap)

    def _simulate_smallest(self, until: float) -> None:
        for settings in sorted(self._structures, key=self._structures.__getitem__):
            self._simulate(settings, self._fillings.smallest)
            if self._plans or self._clock() > until:
                return

    def _try_other_policies(self, until: float) -> None:
        for plan in list(ranked(self._plans))[:POLICY_CANDIDATES]:
            if self._bounds[plan.settings] < min(each.seconds.step for each in self._plans):
                for policy in self._job.axes[POLICY]:
                    if policy == dict(plan.settings)[POLICY]:
                        continue
                    if self._clock() >= until:
                        return
                    self._report_regularly()
                    self._plans.append(with_policy(self._job, plan, policy))
            del self._bounds[plan.settings]

    def _report_regularly(self) -> None:
        if self._clock() > self._last_report + 1:
            self._report(self._progress())
            self._last_report = self._clock()

    def _progress(self) -> str:
        best = f", best step {min(p.seconds.step for p in self._plans):.2f} s" if self._plans else ""
        least = f", lower bound {self._heap[0].seconds:.2f} s" if self._heap and not self._has_unqueued else ""
        counts = f"{len(self._structures)} structures, {len(self._plans)} plans simulated"
        return f"{counts}, {self._not_fitting} do not fit{best}{least}"

    def _expand_first(self) -> None:
        entry = heapq.heappop(self._heap)
        try:
            if entry.kind == "filling":
                fits = self._simulate(entry.structure, entry.filling, entry.seconds)
                self._enter(entry.structure, self._fillings.after(entry.structure, entry.filling, fits))
            elif entry.kind == "structure":
                self._enter(entry.structure, self._fillings.first(entry.structure))
            elif entry.kind == "sketch":
                config, memory = self._job.sized_without_activations(self._settings(entry.structure, FASTEST))
                self._push(self._job.bound(config, memory, roomy=True), "structure", entry.structure)
        except KeyboardInterrupt:
            heapq.heappush(self._heap, entry)
            raise

    def _simulate(self, structure: tuple[Setting, ...], filling: Filling, bound: float = 0.0) -> bool:
        config, memory = self._job.sized(self._settings(structure, filling))
        if wrong := problems(config, memory):
            self._record_misfit(memory, wrong)
            return False
        settings = self._job.settings_of(config, self._settings(structure, filling))
        plan = Plan(settings, memory, self._job.simulated(config, memory))
        self._plans.append(plan)
        if plan.seconds.step < (1 - MIN_GAIN) * self._best_s:
            self._best_s, self._plans_at_gain = plan.seconds.step, len(self._plans)
        self._bounds[settings] = bound
        self._push(plan.seconds.step, "simulated", structure, filling)
        return True

    def _enter_structure(self, structure: tuple[Setting, ...]) -> float:
        """Queue the structure if its smallest filling may fit; return the missing bytes of that filling."""
        config, least = self._job.sized_without_activations(self._settings(structure, self._fillings.smallest))
        if wrong := problems(config, least):
            self._record_misfit(least, wrong)
        else:
            config = changed(self._job.config, self._settings(structure, FASTEST))
            self._push(self._job.quick_bound(config), "sketch", structure)
        return _missing(least)

    def _enter(self, structure: tuple[Setting, ...], found: Iterable[Filling]) -> None:
        for filling in found:
            config, memory = self._job.sized_without_activations(self._settings(structure, filling))
            if wrong := problems(config, memory):
                self._record_misfit(memory, wrong)
                self._enter(structure, self._fillings.after(structure, filling, fits=False))
            else:
                self._push(self._job.bound(config, memory), "filling", structure, filling)

    def _settings(self, structure: tuple[Setting, ...], filling: Filling) -> tuple[Setting, ...]:
        return structure + self._fillings.settings(filling)

    def _record_misfit(self, memory: Memory, wrong: Sequence[str]) -> None:
        self._not_fitting += 1
        missing = _missing(memory)
        if not self._plans and (self._nearest is None or missing < self._nearest[0]):
            self._nearest = missing, tuple(wrong)

    def _push(self, seconds: float, kind: str, structure: tuple[Setting, ...], filling: Filling = FASTEST) -> None:
        nodes = dict(structure)["trainer.nnodes"]
        heapq.heappush(self._heap, _Entry(seconds, nodes, next(self._numbers), kind, structure, filling))


def _missing(memory: Memory) -> float:
    return max(memory.total(phase) for phase in memory.phases) - memory.budget.bytes


def with_policy(job: Job, plan: Plan, policy: str) -> Plan:
    """Return the plan simulated under another policy."""
    settings = tuple((dict(plan.settings) | {POLICY: policy}).items())
    return Plan(settings, plan.memory, job.simulated(changed(job.config, settings), plan.memory))


def ranked(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Yield the fastest plan of each structure, fastest first; of plans with equal times only the first."""
    seen: set[object] = set()
    for plan in sorted(plans, key=lambda plan: plan.seconds.step):
        structure = structure_of(plan)
        if not seen & {structure, plan.seconds}:
            seen |= {structure, plan.seconds}
            yield plan


def structure_of(plan: Plan) -> tuple[Setting, ...]:
    """Return the structural settings of the plan (not its filling)."""
    return tuple(setting for setting in plan.settings if is_structural(setting[0]))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs in one key, or the reason why it was not simulated."""

    setting: Setting
    plan: Plan | None
    reason: str = ""

    @property
    def is_feasible(self) -> bool:
        """False if the configuration is invalid or does not fit."""
        return self.plan is not None or self.reason in (TIMED_OUT, NOT_FASTER)


def refine(
    job: Job, found: SearchResult, facts: Facts, seconds: float = inf, clock: Clock = time.monotonic
) -> tuple[SearchResult, list[Neighbour]]:
    """Descend from the best plan to neighbours until none gains more than MIN_GAIN, within `seconds` of `clock`. Return
    the plans and the neighbours of the best one. Keys keep the job's values if a change gains at most MIN_GAIN or the
    error of the calibration, so a slightly faster plan can be listed after the best one."""
    neighbours, plans = _Neighbours(job, facts, seconds, clock), list(found.plans)
    while True:
        best = min(plans, key=lambda plan: plan.seconds.step)
        faster = neighbours.faster(best)
        if not faster:
            break
        plans += faster
    best = neighbours.closest_to_job(
        best, best.seconds.step + max(MIN_GAIN * best.seconds.step, _calibration_error_s(job, best))
    )
    least = best.seconds.step - _calibration_error_s(job, best)
    others = [plan for plan in plans if plan.seconds.step > least and structure_of(plan) != structure_of(best)]
    return replace(found, plans=(best, *ranked(others))), neighbours.evaluate_all(best)


def simplest(job: Job, best: Plan, facts: Facts, seconds: float = inf, clock: Clock = time.monotonic) -> Plan:
    """Return the plan with the most of the job's values whose step time equals that of `best` within the error."""
    errors = job.hardware.errors
    neighbours, most = _Neighbours(job, facts, seconds, clock), best.seconds.step + step_error_s(best.seconds, errors)
    return neighbours.closest_to_job(
        best, most, lambda plan: not plan.seconds.is_significantly_slower(best.seconds, errors)
    )


def evaluate_neighbours(job: Job, plan: Plan, facts: Facts) -> list[Neighbour]:
    """Return all evaluated neighbours of this plan, without a time limit."""
    return _Neighbours(job, facts, inf, time.monotonic).evaluate_all(plan)


class _Neighbours:
    """Cached evaluation of plans that differ in few keys; a plan is simulated only if its bound does not exclude it."""

    def __init__(self, job: Job, facts: Facts, seconds: float, clock: Clock):
        self._job, self._facts, self._clock, self._deadline = job, facts, clock, clock() + seconds
        self._job_problems = set(check(job.config, facts))
        self._sized: dict[tuple[Setting, ...], tuple[Config, Memory] | str] = {}
        self._plans: dict[tuple[Setting, ...], Plan] = {}

    def faster(self, best: Plan) -> list[Plan]:
        """Return neighbours that gain more than MIN_GAIN under the policy of the plan or job, as time allows."""
        enough, variants = (1 - MIN_GAIN) * best.seconds.step, [settings for _, settings in self._variants_of(best)]
        under_job_policy = [with_setting(settings, POLICY, self._job.config.fusion.policy) for settings in variants]
        tried = [self._evaluate(settings, enough) for settings in dict.fromkeys([*variants, *under_job_policy])]
        return [plan for plan in tried if isinstance(plan, Plan) and plan.seconds.step < enough]

    def evaluate_all(self, best: Plan) -> list[Neighbour]:
        tried = [(setting, self._evaluate(settings)) for setting, settings in self._variants_of(best)]
        return [
            Neighbour(setting, each) if isinstance(each, Plan) else Neighbour(setting, None, each)
            for setting, each in tried
        ]

    def closest_to_job(self, best: Plan, most: float, accepts: Callable[[Plan], bool] = lambda _: True) -> Plan:
        """Return the plan with as many of the job's values as take at most `most` seconds and are accepted."""
        job, before = self._job, None
        while best is not before:  # some values can only be reset after others
            before = best
            for key, value in before.settings:
                given = value_of(job.config, key)
                if given != value and given in job.axes[key]:
                    tried = self._evaluate(with_setting(best.settings, key, given), most)
                    if isinstance(tried, Plan) and tried.seconds.step <= most and accepts(tried):
                        best = tried
        return best

    def _variants_of(self, best: Plan) -> Iterator[tuple[Setting, tuple[Setting, ...]]]:
        given = dict(best.settings)
        for key, values in self._job.axes.items():
            if key == POLICY:  # all policies are tried separately
                continue
            at = values.index(given[key])
            for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
                yield (key, value), with_setting(best.settings, key, value)

    def _evaluate(self, settings: tuple[Setting, ...], most: float = inf) -> Plan | str:
        if settings in self._plans:
            return self._plans[settings]
        late = self._clock() >= self._deadline
        if settings not in self._sized:
            if late:
                return TIMED_OUT
            self._sized[settings] = self._with_memory(settings)
        if isinstance(sized := self._sized[settings], str):
            return sized
        if self._job.bound(*sized) > most:
            return NOT_FASTER
        if late:
            return TIMED_OUT
        self._plans[settings] = Plan(settings, sized[1], self._job.simulated(*sized))
        return self._plans[settings]

    def _with_memory(self, settings: tuple[Setting, ...]) -> tuple[Config, Memory] | str:
        job = self._job
        if refused := [
            line for line in check(changed(job.config, settings), self._facts) if line not in self._job_problems
        ]:
            return refused[0]
        config, memory = job.with_settings(settings)
        wrong = problems(config, memory)
        return wrong[0] if wrong else (config, memory)


def _calibration_error_s(job: Job, plan: Plan) -> float:
    """Return the calibration error of the step time in seconds; 0 without a calibration."""
    return step_error_s(plan.seconds, job.hardware.errors) if job.cluster.calibration else 0.0


def step_error_s(seconds: Seconds, errors: Mapping[str, float]) -> float:
    """Return the error of the step time in seconds, if the errors of all kinds of work add up."""
    return sum(errors.get(kind, 0.0) * each for kind, each in seconds.kinds.items())
