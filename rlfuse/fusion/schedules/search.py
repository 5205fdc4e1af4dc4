"""Search a schedule by baselines, list scheduling and local search, until it reaches the lower bound.

Deterministic for a seed unless the time limit stops it. The result passes the independent check and is never longer
than the best baseline.

Local search alternates tabu search for a shorter schedule with annealing of schedules that are short
enough but hold too much memory.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np

from rlfuse.fusion.schedules.baselines import baseline_orders, serial_1f1b
from rlfuse.fusion.schedules.bound import bound
from rlfuse.fusion.schedules.list_scheduling import Draws, Found, fits
from rlfuse.fusion.schedules.local_search import COOLING, anneal, state_of, tabu
from rlfuse.fusion.schedules.problem import Model, Problem, ScheduleError
from rlfuse.fusion.schedules.schedule import Schedule, check
from rlfuse.fusion.schedules.shop import TOLERANCE, compile_problem, makespan, peak, timed_rows

Method = Literal["auto", "list"]
FINISHING_S = 1.2e-5  # reserved per operation for the work after the search
DRAWS = 1200  # maximum list schedules under the cap
PATIENCE = 200  # list schedules without improvement before stopping
TARGETS = (0.6, 0.3, 0.8, 0.0, 0.15)  # targets of local search between bound and best makespan, cycled
ROUNDS, STALE = 100, 40  # maximum rounds of local search, and rounds without improvement
STARTS = 60  # list schedules before each tabu search, and before each annealing
STEPS, STEPS_OPERATIONS = 20_000, 60_000_000  # limits of one tabu search
TENURES = (20, 8, 60)  # tenures of tabu search, cycled, since the best one differs between instances
WIDEST = 2.5  # memory of the first annealing start, relative to the cap
STEP = 0.98  # next goal of annealing, relative to the current peak
PROPOSALS = 500_000  # of annealing per goal; doubled with each attempt, more in later rounds


@functools.lru_cache(256)
def search(problem: Problem, *, time_limit: float = 10.0, method: Method = "auto", seed: int = 0) -> Schedule:
    """Return the best (checked) schedule found in about `time_limit` seconds.

    The first call on a machine also compiles for about half a minute, which is not counted. Raises ScheduleError if no
    schedule was found within the memory limit.
    """
    warm_up()
    hunt = _Search(problem, time_limit, seed)
    order = hunt.run(method)
    memory = peak(hunt.shop, order) / problem.memory_unit
    rows, serial = timed_rows(problem, order), serial_1f1b(problem)
    result = Schedule(rows, hunt.bound, serial, memory, hunt.found_by, hunt.elapsed)
    check(problem, result)
    return result


@functools.cache
def warm_up() -> None:
    """Compile the functions of the search, or load them from the cache."""
    model = Model("model", 1, 2, forward=1.0, backward=2.0)
    shop = compile_problem(Problem(1, (model,)))
    order = Draws(shop, 0).draw(2.0, lambda makespan, peak: (makespan,)).order
    state, length = state_of(shop, order), makespan(shop, order)
    bound(shop)
    never = np.zeros(1, np.bool_)
    anneal(shop, state, length, 1.0, 1, 1.0, 0.1, 0, never)
    tabu(shop, state, length, float("inf"), 1, 1, 0, never)


class _Search:
    """State of one search: the best order so far and the elapsed time."""

    def __init__(self, problem: Problem, time_limit: float, seed: int):
        self.began, self.stop = time.perf_counter(), np.zeros(1, np.bool_)
        self.problem, self.shop, self.seed = problem, compile_problem(problem), seed
        self.time_limit = max(0.0, time_limit - FINISHING_S * problem.operations)
        self.limit = problem.memory_limit
        self.draws = Draws(self.shop, seed)
        self.bound = bound(self.shop)
        self.order: np.ndarray | None = None
        self.makespan, self.found_by = float("inf"), ""

    def run(self, method: Method) -> np.ndarray:
        """Run all steps and return the best order."""
        for name, order in baseline_orders(self.problem, self.is_over):
            self.offer(order, name)
        fits_memory = fits(self.shop, self.limit)
        if fits_memory:
            self.list_schedules()
        if fits_memory and method == "auto":
            with self.alarm():
                self.improve()
        if self.order is None:
            raise ScheduleError(
                f"memory: no schedule found within {self.limit:g} per device; serial 1F1B needs "
                f"{self.problem.memory_unit:g}. Raise memory_cap (memory_per_device)"
            )
        return self.order

    def list_schedules(self) -> None:
        improved = 0
        while self.draws.drawn < min(DRAWS, improved + PATIENCE) and not self.is_over():
            if self.draw():
                improved = self.draws.drawn

    def draw(self, settings: np.ndarray | None = None) -> bool:
        """Build a list schedule under the cap; return whether it is better."""
        found = self.draws.draw(self.limit, lambda makespan, peak: (makespan, peak), settings)
        return self.offer(found.order, "list scheduling")

    def improve(self) -> None:
        draws = Draws(self.shop, self.seed + 1)
        failed: dict[float, int] = {}
        improved = 0
        for turn in range(ROUNDS):
            if self.is_over() or turn - improved > STALE:
                return
            before = self.makespan
            self.shorten(turn)
            target = self.bound + TARGETS[turn % len(TARGETS)] * (self.makespan - self.bound)
            if self.is_over():
                return
            if np.isfinite(self.limit) and failed.get(target, 0) < 3 and not self.anneal_to(target, draws, turn):
                failed[target] = failed.get(target, 0) + 1
                for lean in draws.best:
                    self.draw(lean.settings)
            improved = turn if self.makespan < before else improved

    def shorten(self, turn: int) -> None:
        for _ in range(STARTS):
            if self.is_over():
                return
            self.draw()
        listed = self.draws.best
        order = self.order if turn % 2 else listed[turn // 2 % len(listed)].order
        steps = min(STEPS, STEPS_OPERATIONS // self.problem.operations)
        tenure = TENURES[turn % len(TENURES)]
        state = state_of(self.shop, order)
        best, _ = tabu(self.shop, state, self.bound, self.limit, steps, tenure, self.seed * ROUNDS + turn, self.stop)
        self.offer(best, "tabu search")

    def anneal_to(self, target: float, draws: Draws, turn: int) -> bool:
        """Anneal a short schedule into the memory limit, aiming at makespan `target`; return whether it is better."""
        leanest = self._leanest(target * (1 + TOLERANCE), draws)
        if leanest is None:
            return False
        longest = max(target, leanest.makespan) * (1 + TOLERANCE)
        state, largest = state_of(self.shop, leanest.order), float(self.shop.acquires.max())
        while (held := peak(self.shop, state.order)) > self.limit * (1 + TOLERANCE):
            goal = max(self.limit, STEP * held)
            for attempt in range(min(len(COOLING), 1 + turn)):  # cheap at first, so that it fits into a short search
                seed = (self.seed * ROUNDS + turn) * len(COOLING) + attempt
                hot, cold = COOLING[attempt]
                proposals = PROPOSALS * (1 + turn // len(TARGETS)) << attempt
                left = anneal(
                    self.shop, state, longest, goal, proposals, hot * largest, cold * largest, seed, self.stop
                )
                if left == 0 or self.is_over():
                    break
            if left > 0:
                return False
        return self.offer(state.order, "annealing")

    def _leanest(self, longest: float, draws: Draws) -> Found | None:
        """Return the list schedule within makespan `longest` with the lowest peak; else the shortest, if better."""

        def score(makespan: float, peak: float) -> tuple[float, float]:
            return max(0.0, makespan - longest), peak

        draws.rescore(score)
        for _ in range(STARTS):
            if self.is_over():
                break
            best = draws.best[0] if draws.best else None
            widest = best.peak if best is not None and best.makespan <= longest else WIDEST * self.limit
            draws.draw(max(self.limit, widest * draws.rng.uniform(0.9, 1.02)), score)
        best = draws.best[0] if draws.best else None
        return best if best is not None and best.makespan < self.makespan * (1 - TOLERANCE) else None

    def offer(self, order: np.ndarray, method: str) -> bool:
        """Keep an order if it fits and is better than the best so far; return whether it was kept."""
        length = makespan(self.shop, order)
        if peak(self.shop, order) > self.limit * (1 + TOLERANCE) or not length < self.makespan * (1 - TOLERANCE):
            return False
        self.order, self.makespan, self.found_by = order.copy(), length, method
        return True

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Stop the compiled loops at the time limit."""
        timer = threading.Timer(self.time_limit - self.elapsed, self.stop.fill, (True,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def is_over(self) -> bool:
        """Return whether the bound or the time limit is reached."""
        return self.makespan <= self.bound * (1 + TOLERANCE) or self.elapsed > self.time_limit
