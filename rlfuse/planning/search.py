"""The fastest plan that fits: best first by a bound that no schedule beats, simulated where that may still win.

Role: `search` is called by `rlfuse plan --search`. Pure but for simulating and tracing; waits for nothing.
How: a structure (degrees, ZeRO stage, machines) enters with the bound of its fastest filling, is then replaced by its
fillings with bounds of their own, and a filling that fits by the step that the simulator takes under the job's policy.
The bound is `simulate.bound`, on the same samples, and of every policy; so when a simulated plan comes first, no plan
that was not looked at is faster. The first plans are then simulated under the other policies. Where time runs out
before (or Ctrl-C comes), `Found.bound_s` tells what could still be gained; where no plan was found until then, those
that need the least memory are tried, for as long again at most.
Invariants: what does not fit is no plan; memory without activations, which takes no trace, is asked first. The engine's
cache is the largest that fits: the simulator is some thousandths faster with a smaller one now and then.
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
from rlfuse.planning.memory import Memory, problems
from rlfuse.planning.remedies import Setting, changed
from rlfuse.planning.space import POLICY, fillings, structural, structures
from rlfuse.planning.step_time import Job, Seconds

SECONDS = 60.0
"""Of a search, after which the best plan so far is told with what could still be gained."""
FIRST = 8
"""Plans that are simulated under every policy."""
NOTHING = 0.002
"""Share of a step for which no key is worth changing."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that fits."""

    settings: tuple[Setting, ...]
    memory: Memory
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Found:
    """Plans, the best first, then the fastest, one for each structure that was simulated."""

    plans: tuple[Plan, ...]
    bound_s: float
    """No plan of the space takes less; the first plan's own step where the search came to its end."""
    left: int
    """Structures and fillings that were not looked at when time was out; 0 where the search came to its end."""
    structures: int
    simulated: int
    not_fitting: int
    nearest: tuple[float, tuple[str, ...]] | None = None
    """Where nothing fits: bytes that are missing at the least, and why."""


@dataclass(order=True, slots=True)
class _Entry:
    seconds: float
    number: int
    settings: tuple[Setting, ...] = field(compare=False)
    kind: str = field(compare=False)
    """`structure`, `filling` or `simulated`."""


def search(job: Job, facts: Facts, seconds: float = SECONDS, tell: Progress = lambda _: None) -> Found:
    """Look for the fastest plan. `tell` is called with a line of progress now and then."""
    return _Search(job, tell).run(facts, seconds)


class _Search:
    def __init__(self, job: Job, tell: Progress):
        self._job, self._tell = job, tell
        self._fillings = fillings(job.axes)
        self._heap: list[_Entry] = []
        self._numbers = count()
        self._plans: list[Plan] = []
        self._under_one: dict[tuple[Setting, ...], float] = {}
        """Bounds of plans that were simulated under the job's policy only."""
        self._refused, self._nearest = 0, None
        self._structures: list[tuple[Setting, ...]] = []
        self._told = time.monotonic()

    def run(self, facts: Facts, seconds: float) -> Found:
        until = time.monotonic() + seconds
        try:
            for settings in structures(self._job.config, facts, self._job.axes, self._job.shapes["actor"]):
                self._structures.append(settings)
                self._enter_structure(settings)
                self._tell_at_times()
            while self._left() and time.monotonic() < until:
                self._open_first()
                self._tell_at_times()
            if self._left() and not self._plans:
                self._try_the_smallest(time.monotonic() + seconds)
            self._try_other_policies()
        except KeyboardInterrupt:
            if not self._plans:
                raise
        bounds = [entry.seconds for entry in self._heap] + list(self._under_one.values())
        plans, count = tuple(ranked(self._plans)), len(self._structures)
        return Found(
            plans, min(bounds, default=inf), self._left(), count, len(self._plans), self._refused, self._nearest
        )

    def _left(self) -> int:
        """Entries that may hide a faster plan; 0 once a plan comes first."""
        done = not self._heap or self._heap[0].kind == "simulated"
        return 0 if done else sum(entry.kind != "simulated" for entry in self._heap)

    def _try_the_smallest(self, until: float) -> None:
        """Until one fits: in the order of their memory without activations, with the filling that has the fewest."""
        lean = [settings + self._fillings[-1] for settings in self._structures]
        sizes = [memory for _, memory in map(self._job.lean, lean)]
        for settings, _ in sorted(zip(lean, sizes, strict=True), key=lambda each: _missing(each[1])):
            self._simulate(settings)
            if self._plans or time.monotonic() > until:
                return

    def _try_other_policies(self) -> None:
        """With the first plans of all."""
        for plan in list(ranked(self._plans))[:FIRST]:
            if self._under_one.pop(plan.settings) < min(each.seconds.step for each in self._plans):
                self._tell_at_times()
                self._plans += under_other_policies(self._job, plan)

    def _tell_at_times(self) -> None:
        if time.monotonic() > self._told + 1:
            self._tell(self._progress())
            self._told = time.monotonic()

    def _progress(self) -> str:
        best = f", the best so far {min(p.seconds.step for p in self._plans):.2f} s" if self._plans else ""
        least = f"; none can take less than {self._heap[0].seconds:.2f} s" if self._heap else ""
        looked = f"{len(self._structures)} structures, {len(self._plans)} plans simulated"
        return f"{looked}, {self._refused} don't fit{best}{least}"

    def _open_first(self) -> None:
        """Put what the first entry stands for in its place."""
        entry = heapq.heappop(self._heap)
        try:
            if entry.kind == "filling":
                self._simulate(entry.settings, entry.seconds)
            for filling in self._fillings if entry.kind == "structure" else ():
                self._enter_filling(entry.settings + filling)
        except KeyboardInterrupt:
            heapq.heappush(self._heap, entry)
            raise

    def _simulate(self, settings: tuple[Setting, ...], bound: float = 0.0) -> None:
        config, memory = self._job.sized(settings)
        if wrong := problems(config, memory):
            self._refuse(memory, wrong)
            return
        settings = self._job.settings_of(config, settings)
        plan = Plan(settings, memory, self._job.times.simulated(config, memory))
        self._plans.append(plan)
        self._under_one[settings] = bound
        self._push(plan.seconds.step, settings, "simulated")

    def _enter_structure(self, settings: tuple[Setting, ...]) -> None:
        """With its fastest filling and a cache as if nothing else were on the device; if its smallest may fit."""
        config, memory = self._job.lean(settings + self._fillings[-1])
        if wrong := problems(config, memory):
            self._refuse(memory, wrong)
            return
        config, memory = self._job.lean(settings + self._fillings[0])
        self._push(self._job.times.bound(config, memory, roomy=True), settings, "structure")

    def _enter_filling(self, settings: tuple[Setting, ...]) -> None:
        config, memory = self._job.lean(settings)
        if wrong := problems(config, memory):
            self._refuse(memory, wrong)
        else:
            self._push(self._job.times.bound(config, memory), settings, "filling")

    def _refuse(self, memory: Memory, wrong: Sequence[str]) -> None:
        self._refused += 1
        missing = _missing(memory)
        if not self._plans and (self._nearest is None or missing < self._nearest[0]):
            self._nearest = missing, tuple(wrong)

    def _push(self, seconds: float, settings: tuple[Setting, ...], kind: str) -> None:
        heapq.heappush(self._heap, _Entry(seconds, next(self._numbers), settings, kind))


def _missing(memory: Memory) -> float:
    """Bytes by which the fullest phase exceeds the device."""
    return max(memory.total(phase) for phase in memory.phases) - memory.budget.bytes


def under_other_policies(job: Job, plan: Plan) -> list[Plan]:
    """The same under each of the job's policies but its own."""
    given, found = dict(plan.settings), []
    for policy in job.axes[POLICY]:
        if policy != given[POLICY]:
            settings = tuple((given | {POLICY: policy}).items())
            seconds = job.times.simulated(changed(job.config, settings), plan.memory)
            found.append(Plan(settings, plan.memory, seconds))
    return found


def ranked(plans: Iterable[Plan]) -> Iterator[Plan]:
    """The fastest first, one for each structure; of those that take the very same, the first."""
    seen: set[object] = set()
    for plan in sorted(plans, key=lambda plan: plan.seconds.step):
        structure = _structure(plan)
        if not seen & {structure, plan.seconds}:
            seen |= {structure, plan.seconds}
            yield plan


def _structure(plan: Plan) -> tuple[Setting, ...]:
    return tuple(setting for setting in plan.settings if structural(setting[0]))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs in one key, and what becomes of it."""

    setting: Setting
    plan: Plan | None
    why_not: str = ""


def settled(job: Job, found: Found, facts: Facts) -> tuple[Found, list[Neighbour]]:
    """The plans with the best one's neighbours, and theirs, until none gains more than next to nothing; and the
    neighbours of that plan. Keys stay as the job has them where their change gains next to nothing, or no more than a
    calibration's error leaves open: then faster plans come behind.
    """
    plans, enough = list(found.plans), 1 - NOTHING
    while True:
        best = min(plans, key=lambda plan: plan.seconds.step)
        around = list(_neighbours(job, best, facts))
        faster = [each.plan for each in around if each.plan and each.plan.seconds.step < enough * best.seconds.step]
        if not faster:
            break
        plans += faster
    if (plain := _nearer_the_job(job, best, facts)) is not best:
        best, around = plain, list(_neighbours(job, plain, facts))
    least = best.seconds.step - _left_open(job, best)
    others = [plan for plan in plans if plan.seconds.step > least and _structure(plan) != _structure(best)]
    return replace(found, plans=(best, *ranked(others))), around


def _nearer_the_job(job: Job, best: Plan, facts: Facts) -> Plan:
    """The plan with as many of the job's own values as cost next to nothing, or nothing that could be told."""
    most = best.seconds.step + max(NOTHING * best.seconds.step, _left_open(job, best))
    for key, value in best.settings:
        given = value_of(job.config, key)
        if given != value and given in job.axes[key]:
            tried = _tried(job, tuple((dict(best.settings) | {key: given}).items()), facts)
            if isinstance(tried, Plan) and tried.seconds.step <= most:
                best = tried
    return best


def _left_open(job: Job, plan: Plan) -> float:
    """Seconds of a step by which a calibration was off; 0 where none was made: an allowance tells nothing of plans."""
    return error_of(plan.seconds, job.hardware.errors) if job.cluster.calibration else 0.0


def _tried(job: Job, settings: tuple[Setting, ...], facts: Facts) -> Plan | str:
    """The plan, or why it can't be."""
    known = set(check(job.config, facts))
    if refused := [line for line in check(changed(job.config, settings), facts) if line not in known]:
        return refused[0]
    config, memory = job.with_settings(settings)
    if wrong := problems(config, memory):
        return wrong[0]
    return Plan(settings, memory, job.times.simulated(config, memory))


def _neighbours(job: Job, best: Plan, facts: Facts) -> Iterator[Neighbour]:
    """For each axis the values beside the best plan's, simulated, or why they can't be."""
    given = dict(best.settings)
    for key, values in job.axes.items():
        if key == POLICY:  # each was tried with every plan
            continue
        at = values.index(given[key])
        for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
            tried = _tried(job, tuple((given | {key: value}).items()), facts)
            yield Neighbour((key, value), *((tried,) if isinstance(tried, Plan) else (None, tried)))


def surely_slower(plan: Plan, other: Plan, errors: Mapping[str, float]) -> bool:
    """Whether `other` is, whatever the errors of each kind of work, which two plans on one machine have in common."""
    mine, others = plan.seconds.kinds, other.seconds.kinds
    unsure = sum(errors.get(kind, 0.0) * abs(others[kind] - mine[kind]) for kind in mine)
    return other.seconds.step - plan.seconds.step > unsure


def error_of(seconds: Seconds, errors: Mapping[str, float]) -> float:
    """Seconds by which a step may be off, were all kinds of work off in the same direction."""
    return sum(errors.get(kind, 0.0) * each for kind, each in seconds.kinds.items())
