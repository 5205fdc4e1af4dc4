"""Search the fastest plan that fits: best first by a lower bound, simulated where it may still win.

A structure (degrees, ZeRO stage, machines) enters with a sketch of the bound of its fastest filling, then gets its
bound, then its fillings, each simulated if it fits. When a simulated plan comes first, no other plan is faster.
`refine` then descends from neighbour to neighbour.
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

SEARCH_SHARE = 0.7  # share of a search's time after which the plans that were found are tried under other policies
POLICY_CANDIDATES = 8  # plans that are simulated under every policy
TIMED_OUT, NOT_FASTER = "not looked at in time", "can't be as fast"
Progress, Clock = Callable[[str], None], Callable[[], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that fits."""

    settings: tuple[Setting, ...]
    memory: Memory
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Plans, the best first, then the fastest, one for each structure that was simulated."""

    plans: tuple[Plan, ...]
    bound_s: float  # no plan of the space takes less; 0 if not all structures were bounded
    unexplored: int  # structures and fillings not looked at in time; 0: the search is complete
    structures: int
    simulated: int
    not_fitting: int
    nearest: tuple[float, tuple[str, ...]] | None = None  # if nothing fits: missing bytes, and why


@dataclass(order=True, slots=True)
class _Entry:
    seconds: float
    nodes: int  # of equals the fewest machines come first
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
    """Search the fastest plan for at most `seconds` of `clock`. `report_progress` receives lines of progress; the search ends
    after `patience` plans in a row without gain."""
    return _Search(job, report_progress, clock).run(facts, seconds, patience)


class _Search:
    def __init__(self, job: Job, report_progress: Progress, clock: Clock):
        self._job, self._tell, self._clock = job, report_progress, clock
        self._fillings = Fillings(job.axes)
        self._heap: list[_Entry] = []
        self._numbers = count()
        self._plans: list[Plan] = []
        self._under_one: dict[tuple[Setting, ...], float] = {}  # bounds of plans simulated under one policy
        self._refused, self._nearest = 0, None
        self._structures: dict[tuple[Setting, ...], float] = {}  # bytes that each misses at least
        self._least, self._gained = inf, 0  # best step, and plans simulated by then
        self._unseen = True  # whether there are structures that time did not reach for
        self._told = self._clock()

    def run(self, facts: Facts, seconds: float, patience: float = inf) -> SearchResult:
        now = self._clock()
        looking, until = now + SEARCH_SHARE * seconds, now + seconds
        try:
            self._enter_structures(facts, looking)
            while not self._done and self._clock() < looking and len(self._plans) < self._gained + patience:
                self._open_first()
                self._tell_at_times()
            if not self._done and not self._plans:
                self._try_the_smallest(until)
            self._try_other_policies(until)
        except KeyboardInterrupt:
            if not self._plans:
                raise
        bounds = [entry.seconds for entry in self._heap] + list(self._under_one.values()) + [0.0] * self._unseen
        plans, count = tuple(ranked(self._plans)), len(self._structures)
        return SearchResult(
            plans, min(bounds, default=inf), self._left(), count, len(self._plans), self._refused, self._nearest
        )

    def _enter_structures(self, facts: Facts, until: float) -> None:
        job = self._job
        for settings in structures(job.config, facts, job.axes, job.shapes["actor"], job.cluster):
            if self._heap and self._clock() >= until:
                return
            self._structures[settings] = self._enter_structure(settings)
            self._tell_at_times()
        self._unseen = False

    @property
    def _done(self) -> bool:
        return not self._unseen and (not self._heap or self._heap[0].kind == "simulated")

    def _left(self) -> int:
        return 0 if self._done else self._unseen + sum(entry.kind != "simulated" for entry in self._heap)

    def _try_the_smallest(self, until: float) -> None:
        for settings in sorted(self._structures, key=self._structures.__getitem__):
            self._simulate(settings, self._fillings.smallest)
            if self._plans or self._clock() > until:
                return

    def _try_other_policies(self, until: float) -> None:
        for plan in list(ranked(self._plans))[:POLICY_CANDIDATES]:
            if self._under_one[plan.settings] < min(each.seconds.step for each in self._plans):
                for policy in self._job.axes[POLICY]:
                    if policy == dict(plan.settings)[POLICY]:
                        continue
                    if self._clock() >= until:
                        return
                    self._tell_at_times()
                    self._plans.append(with_policy(self._job, plan, policy))
            del self._under_one[plan.settings]

    def _tell_at_times(self) -> None:
        if self._clock() > self._told + 1:
            self._tell(self._progress())
            self._told = self._clock()

    def _progress(self) -> str:
        best = f", the best so far {min(p.seconds.step for p in self._plans):.2f} s" if self._plans else ""
        least = f"; none can take less than {self._heap[0].seconds:.2f} s" if self._heap and not self._unseen else ""
        looked = f"{len(self._structures)} structures, {len(self._plans)} plans simulated"
        return f"{looked}, {self._refused} don't fit{best}{least}"

    def _open_first(self) -> None:
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
            self._refuse(memory, wrong)
            return False
        settings = self._job.settings_of(config, self._settings(structure, filling))
        plan = Plan(settings, memory, self._job.simulated(config, memory))
        self._plans.append(plan)
        if plan.seconds.step < (1 - MIN_GAIN) * self._least:
            self._least, self._gained = plan.seconds.step, len(self._plans)
        self._under_one[settings] = bound
        self._push(plan.seconds.step, "simulated", structure, filling)
        return True

    def _enter_structure(self, structure: tuple[Setting, ...]) -> float:
        """Add its fastest filling if its smallest may fit; return the bytes missing, as `_missing`."""
        config, least = self._job.sized_without_activations(self._settings(structure, self._fillings.smallest))
        if wrong := problems(config, least):
            self._refuse(least, wrong)
        else:
            config = changed(self._job.config, self._settings(structure, FASTEST))
            self._push(self._job.quick_bound(config), "sketch", structure)
        return _missing(least)

    def _enter(self, structure: tuple[Setting, ...], found: Iterable[Filling]) -> None:
        for filling in found:
            config, memory = self._job.sized_without_activations(self._settings(structure, filling))
            if wrong := problems(config, memory):
                self._refuse(memory, wrong)
                self._enter(structure, self._fillings.after(structure, filling, fits=False))
            else:
                self._push(self._job.bound(config, memory), "filling", structure, filling)

    def _settings(self, structure: tuple[Setting, ...], filling: Filling) -> tuple[Setting, ...]:
        return structure + self._fillings.settings(filling)

    def _refuse(self, memory: Memory, wrong: Sequence[str]) -> None:
        self._refused += 1
        missing = _missing(memory)
        if not self._plans and (self._nearest is None or missing < self._nearest[0]):
            self._nearest = missing, tuple(wrong)

    def _push(self, seconds: float, kind: str, structure: tuple[Setting, ...], filling: Filling = FASTEST) -> None:
        nodes = dict(structure)["trainer.nnodes"]
        heapq.heappush(self._heap, _Entry(seconds, nodes, next(self._numbers), kind, structure, filling))


def _missing(memory: Memory) -> float:
    return max(memory.total(phase) for phase in memory.phases) - memory.budget.bytes


def with_policy(job: Job, plan: Plan, policy: str) -> Plan:
    """The same under another policy."""
    settings = tuple((dict(plan.settings) | {POLICY: policy}).items())
    return Plan(settings, plan.memory, job.simulated(changed(job.config, settings), plan.memory))


def ranked(plans: Iterable[Plan]) -> Iterator[Plan]:
    """The fastest first, one for each structure; of those that take the very same, the first."""
    seen: set[object] = set()
    for plan in sorted(plans, key=lambda plan: plan.seconds.step):
        structure = structure_of(plan)
        if not seen & {structure, plan.seconds}:
            seen |= {structure, plan.seconds}
            yield plan


def structure_of(plan: Plan) -> tuple[Setting, ...]:
    """Return the plan's settings that make it a plan of its own to a reader."""
    return tuple(setting for setting in plan.settings if is_structural(setting[0]))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs in one key, and what becomes of it."""

    setting: Setting
    plan: Plan | None
    reason: str = ""


def refine(
    job: Job, found: SearchResult, facts: Facts, seconds: float = inf, clock: Clock = time.monotonic
) -> tuple[SearchResult, list[Neighbour]]:
    """Descend from the best plan to neighbours until none gains more than NOTHING, within `seconds` of `clock`; return
    the plans and the neighbours of the best one. Keys keep the job's values where a change gains no more than NOTHING,
    or than a calibration's error: faster plans then come behind."""
    neighbours, plans = _Neighbours(job, facts, seconds, clock), list(found.plans)
    while True:
        best = min(plans, key=lambda plan: plan.seconds.step)
        faster = neighbours.faster(best)
        if not faster:
            break
        plans += faster
    best = neighbours.nearer_the_job(best)
    least = best.seconds.step - _left_open(job, best)
    others = [plan for plan in plans if plan.seconds.step > least and structure_of(plan) != structure_of(best)]
    return replace(found, plans=(best, *ranked(others))), neighbours.told(best)


def evaluate_neighbours(job: Job, plan: Plan, facts: Facts) -> list[Neighbour]:
    """Return what becomes of the neighbours of this plan, however long that takes."""
    return _Neighbours(job, facts, inf, time.monotonic).told(plan)


class _Neighbours:
    """Plans that differ in few keys; nothing is tried twice, or simulated where a bound is enough."""

    def __init__(self, job: Job, facts: Facts, seconds: float, clock: Clock):
        self._job, self._facts, self._clock, self._until = job, facts, clock, clock() + seconds
        self._known = set(check(job.config, facts))
        self._sized: dict[tuple[Setting, ...], tuple[Config, Memory] | str] = {}
        self._plans: dict[tuple[Setting, ...], Plan] = {}

    def faster(self, best: Plan) -> list[Plan]:
        """Return the neighbours that gain more than NOTHING, as time allows, under the plan's and the job's policy."""
        enough, beside = (1 - MIN_GAIN) * best.seconds.step, [settings for _, settings in self._beside(best)]
        own = [with_setting(settings, POLICY, self._job.config.fusion.policy) for settings in beside]
        tried = [self._tried(settings, enough) for settings in dict.fromkeys([*beside, *own])]
        return [plan for plan in tried if isinstance(plan, Plan) and plan.seconds.step < enough]

    def told(self, best: Plan) -> list[Neighbour]:
        tried = [(setting, self._tried(settings)) for setting, settings in self._beside(best)]
        return [
            Neighbour(setting, each) if isinstance(each, Plan) else Neighbour(setting, None, each)
            for setting, each in tried
        ]

    def nearer_the_job(self, best: Plan) -> Plan:
        """Return the plan with as many of the job's values as cost no more than NOTHING or the error."""
        job, before = self._job, None
        most = best.seconds.step + max(MIN_GAIN * best.seconds.step, _left_open(job, best))
        while best is not before:  # some values can go only when others have gone
            before = best
            for key, value in before.settings:
                given = value_of(job.config, key)
                if given != value and given in job.axes[key]:
                    tried = self._tried(with_setting(best.settings, key, given), most)
                    if isinstance(tried, Plan) and tried.seconds.step <= most:
                        best = tried
        return best

    def _beside(self, best: Plan) -> Iterator[tuple[Setting, tuple[Setting, ...]]]:
        given = dict(best.settings)
        for key, values in self._job.axes.items():
            if key == POLICY:  # each was tried with every plan
                continue
            at = values.index(given[key])
            for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
                yield (key, value), with_setting(best.settings, key, value)

    def _tried(self, settings: tuple[Setting, ...], most: float = inf) -> Plan | str:
        if settings in self._plans:
            return self._plans[settings]
        late = self._clock() >= self._until
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
        if refused := [line for line in check(changed(job.config, settings), self._facts) if line not in self._known]:
            return refused[0]
        config, memory = job.with_settings(settings)
        wrong = problems(config, memory)
        return wrong[0] if wrong else (config, memory)


def _left_open(job: Job, plan: Plan) -> float:
    """Return the error of a step in seconds by a calibration; 0 without one."""
    return step_error_s(plan.seconds, job.hardware.errors) if job.cluster.calibration else 0.0


def step_error_s(seconds: Seconds, errors: Mapping[str, float]) -> float:
    """Seconds by which a step may be off, were all kinds of work off in the same direction."""
    return sum(errors.get(kind, 0.0) * each for kind, each in seconds.kinds.items())
