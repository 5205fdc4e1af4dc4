"""List scheduling: build a schedule in chronological order by priority rules; hundreds per second.

Priority of micro-batch m of class c, whose forward class holds h micro-batches on the device: `level[c] + slope[c] *
(micro-batches of c after m) + pressure[c] * h`. A forward starts if the device can hold it together with one
micro-batch of each other unfinished forward class that holds none, so the memory limit never causes a deadlock.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.shop import NONE, TOLERANCE, B, F, Shop, W, backward_of, peak


class Rules(NamedTuple):
    """Priority rules; arrays over classes."""

    level: np.ndarray
    slope: np.ndarray
    pressure: np.ndarray
    quota: np.ndarray  # maximum micro-batches that a forward class may hold
    patience: float  # maximum idle time of a device for an operation of higher priority


def fits(shop: Shop, limit: float) -> bool:
    """Return whether every device can hold one micro-batch of each of its forward classes."""
    return bool(shop.acquires[shop.of_device].sum(axis=1).max() <= limit * (1 + TOLERANCE))


def round_trips(shop: Shop) -> np.ndarray:
    """Return forward class -> minimum time from its start to the end of its backward; 0 for other classes."""
    tail, trip = chain_tails(shop), np.zeros(len(shop.micro_batches))
    trains = np.isin(shop.lane, shop.lane[shop.kind == B])
    for c in np.flatnonzero(trains & (shop.kind == F)):
        after = shop.after[backward_of(shop, c)]
        trip[c] = tail[c] - (0.0 if after == NONE else tail[after])
    return trip


def chain_tails(shop: Shop) -> np.ndarray:
    """Return class -> minimum time from the start of an operation to the end of its chain."""
    tail = shop.duration.copy()
    for c in sorted(range(len(tail)), key=lambda c: (shop.kind[c] != W, -c)):
        for following in (shop.after[c], shop.leaf[c]):
            if following != NONE:
                tail[c] = max(tail[c], shop.duration[c] + shop.lag[following] + tail[following])
    return tail


@njit(cache=True)
def schedule(shop: Shop, limit: float, rules: Rules) -> tuple[np.ndarray, float]:
    """Return an order under the memory limit and its makespan. The limit must satisfy `fits`."""
    devices, classes = shop.of_device.shape[0], len(shop.micro_batches)
    length = len(shop.class_of) // devices
    order, end = np.empty((devices, length), np.int64), np.empty(len(shop.class_of))
    begun, held = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    filled, free, room = np.zeros(devices, np.int64), np.zeros(devices), np.full(devices, limit * (1 + TOLERANCE))
    ready = np.full(classes, np.inf)  # when the input of a class's next operation is available
    for c in range(classes):
        if shop.before[c] == NONE:
            ready[c] = 0.0
    forward = _forwards(shop)
    next_start, next_class = np.full(devices, np.inf), np.full(devices, NONE)
    for each in range(devices):
        next_class[each], next_start[each] = _choose(shop, rules, each, begun, held, ready, 0.0, room[each])
    for _ in range(devices * length):
        device = np.argmin(next_start)
        c, start = next_class[device], next_start[device]
        micro_batch = begun[c]
        begun[c] += 1
        order[device, filled[device]] = shop.first[c] + micro_batch
        filled[device] += 1
        room[device] += shop.releases[c] - shop.acquires[c]
        held[c] += shop.kind[c] == F
        held[forward[c]] -= forward[c] != NONE
        free[device] = end[shop.first[c] + micro_batch] = start + shop.duration[c]
        _next_ready(shop, c, begun, ready, end)
        woken = device
        for following in (shop.leaf[c], shop.after[c]):
            if following != NONE and begun[following] == micro_batch:
                ready[following] = free[device] + shop.lag[following]
                woken = shop.device[following]
        for other in (device, woken):
            next_class[other], next_start[other] = _choose(
                shop, rules, other, begun, held, ready, free[other], room[other]
            )
    return order, free.max()


@njit(cache=True)
def _forwards(shop: Shop) -> np.ndarray:
    """Return, for each class that frees an activation, the forward class that created it; else NONE.

    Forwards of a score-only model free their own activation.
    """
    forward = np.full(len(shop.micro_batches), NONE)
    trains = np.zeros(len(shop.micro_batches), np.bool_)  # lane -> it has backwards
    trains[shop.lane[shop.kind == B]] = True
    for c in range(len(shop.micro_batches)):
        if shop.releases[c] > 0 or (shop.kind[c] != F and shop.leaf[c] == NONE):
            backward = shop.before[c] if shop.kind[c] == W else c
            at, steps = backward, 0
            while shop.kind[at] == B:
                at, steps = shop.before[at], steps + 1
            forward[c] = at - steps + 1
        elif not trains[shop.lane[c]]:
            forward[c] = c
    return forward


@njit(cache=True)
def _next_ready(shop: Shop, c: int, begun: np.ndarray, ready: np.ndarray, end: np.ndarray) -> None:
    before, micro_batch = shop.before[c], begun[c]
    if micro_batch == shop.micro_batches[c] or (before != NONE and begun[before] <= micro_batch):
        ready[c] = np.inf
    elif before != NONE:
        ready[c] = end[shop.first[before] + micro_batch] + shop.lag[c]


@njit(cache=True)
def _choose(
    shop: Shop,
    rules: Rules,
    device: int,
    begun: np.ndarray,
    held: np.ndarray,
    ready: np.ndarray,
    free: float,
    room: float,
) -> tuple[int, float]:
    """Return the class that a device runs next and its start time; infinity if no class can become ready."""
    for c in shop.of_device[device]:
        if shop.kind[c] == F and held[c] == 0 and begun[c] < shop.micro_batches[c]:
            room -= shop.acquires[c]
    earliest = np.inf
    for c in shop.of_device[device]:
        if ready[c] < earliest and _admitted(shop, rules, c, held, room):
            earliest = ready[c]
    earliest = max(earliest, free)
    chosen, best, start = NONE, -np.inf, np.inf
    if earliest == np.inf:
        return chosen, start
    for c in shop.of_device[device]:
        if ready[c] <= earliest + rules.patience and _admitted(shop, rules, c, held, room):
            wait = max(0.0, ready[c] - earliest)
            priority = rules.level[c] + rules.slope[c] * (shop.micro_batches[c] - 1 - begun[c]) - wait
            priority += rules.pressure[c] * held[c]
            if priority > best:
                chosen, best, start = c, priority, earliest + wait
    return chosen, start


@njit(cache=True, inline="always")
def _admitted(shop: Shop, rules: Rules, c: int, held: np.ndarray, room: float) -> bool:
    """Return whether quota and memory allow the class's next operation; its first micro-batch is reserved."""
    return shop.kind[c] != F or held[c] == 0 or (held[c] < rules.quota[c] and shop.acquires[c] <= room)


MAX_KEPT = 6
FRESH_SHARE = 0.3  # fraction of draws with fresh random settings
SHARED = 4
"""Number of settings shared by all pipelines. Bias, slope and pressure of each pipeline follow, and its quota if
backwards are not split: with W as a filler, quotas do not help and only enlarge the search space."""
NO_QUOTA = 5.0  # quotas are exp(this) times the micro-batches in flight in a steady state


class Found(NamedTuple):
    """A schedule and its quality."""

    score: tuple[float, ...]
    """Lower is better. The last entry breaks ties in favour of later draws, so that the search moves along plateaus."""
    settings: np.ndarray
    order: np.ndarray
    makespan: float
    peak: float


class Draws:
    """Random search over the rules of list scheduling."""

    def __init__(self, shop: Shop, seed: int):
        self.shop, self.rng = shop, np.random.default_rng(seed)
        self.lanes = int(shop.lane.max()) + 1
        self.tail = chain_tails(shop)
        self.scale = float(self.tail.max())
        stages = np.bincount(shop.lane, shop.kind == F)
        self.work = np.bincount(shop.lane, shop.duration) / stages  # of a micro-batch on one device
        busy = np.bincount(shop.device, shop.duration * shop.micro_batches)
        self.in_flight = (
            round_trips(shop) * shop.micro_batches / busy[shop.device]
        )  # by Little's law, in a steady state
        self.split = bool((shop.kind == W).any())
        self.upper = _upper_chunks(shop)
        self.best: list[Found] = []
        self.drawn = 0

    def draw(
        self, limit: float, score: Callable[[float, float], tuple[float, ...]], settings: np.ndarray | None = None
    ) -> Found:
        """Build a schedule under a memory limit from `settings`, or from random ones.

        `score` of (makespan, peak memory) decides which schedules are kept.
        """
        self.drawn += 1
        if settings is None:
            fresh = len(self.best) < MAX_KEPT or self.rng.random() < FRESH_SHARE
            settings = self._fresh() if fresh else self._changed(self._chosen())
        order, makespan = schedule(self.shop, limit, self._rules(settings))
        most = peak(self.shop, order)
        found = Found((*score(makespan, most), -self.drawn), settings, order, makespan, most)
        bisect.insort(self.best, found, key=lambda each: each.score)
        del self.best[MAX_KEPT:]
        return found

    def rescore(self, score: Callable[[float, float], tuple[float, ...]]) -> None:
        """Rank the kept schedules by another score."""
        self.best = [each._replace(score=(*score(each.makespan, each.peak), each.score[-1])) for each in self.best]
        self.best.sort(key=lambda each: each.score)

    def _chosen(self) -> np.ndarray:
        return self.best[int(self.rng.integers(len(self.best)) * self.rng.random())].settings

    def _fresh(self) -> np.ndarray:
        rng, lanes, alike = self.rng, self.lanes, self.rng.random() < 0.4
        spread = rng.uniform(1.0, 1.0, lanes) if alike else rng.uniform(0.6, 1.4, lanes)
        shared = (
            rng.choice([0.0, 1.0, rng.uniform(-0.5, 1.0)]),  # B over F
            rng.choice([-4.0, -4.0, rng.uniform(-2.0, 0.0)]),  # W: mostly a filler
            rng.choice([0.0, 0.0, 0.5, 1.0]) * rng.choice(self.shop.duration),  # patience
            rng.choice([0.0, rng.normal(0.0, 0.3)]),  # the upper chunk of a V
        )
        bias = np.zeros(lanes) if alike else rng.normal(0.0, rng.choice([0.1, 0.5]), lanes)
        slope = rng.choice([0.0, 1.0, rng.uniform(0.0, 2.0), rng.exponential(1.0)]) * spread
        pressure = rng.choice([0.0, rng.uniform(0.0, 0.3), rng.exponential(0.3)]) * spread
        settings = [shared, bias, slope, pressure]
        if not self.split:
            quota = rng.choice([np.full(lanes, NO_QUOTA), np.full(lanes, rng.uniform(0, 2)), rng.uniform(0, 2, lanes)])
            settings.append(quota)
        return np.concatenate(settings)

    def _changed(self, settings: np.ndarray) -> np.ndarray:
        rng, lanes, size = self.rng, self.lanes, len(settings)
        sizes = np.repeat([0.15, 0.3, 0.1, 0.2], lanes)
        sizes = np.concatenate([[0.3, 0.5, 0.5 * self.shop.duration.mean(), 0.2], sizes])[:size]
        moved = rng.random(size) < rng.choice([1.5 / size, 0.3, 1.0])
        moved[rng.integers(size)] = True
        changed = settings + moved * sizes * rng.normal(0.0, 1.0, size) * rng.choice([0.2, 1.0, 1.0])
        changed[2] = max(0.0, changed[2])
        changed[SHARED + lanes :] = np.abs(changed[SHARED + lanes :])
        return changed

    def _rules(self, settings: np.ndarray) -> Rules:
        backward, weights, patience, upper = settings[:SHARED]
        bias, slope, pressure, *quota = settings[SHARED:].reshape(-1, self.lanes)
        shop = self.shop
        by_kind = np.zeros(3)
        by_kind[B], by_kind[W] = backward, weights
        level = self.tail + (bias[shop.lane] + by_kind[shop.kind] + upper * self.upper) * self.scale
        held = np.where(shop.kind == F, -pressure[shop.lane] * self.scale, 0.0)
        quotas = np.exp(*quota)[shop.lane] * self.in_flight + 1.0 if quota else np.full(len(shop.micro_batches), np.inf)
        return Rules(level, (slope * self.work)[shop.lane], held, quotas, float(patience))


def _upper_chunks(shop: Shop) -> np.ndarray:
    """Return 1 for forwards of a pipeline's second chunk on its device, else 0."""
    upper, seen = np.zeros(len(shop.micro_batches)), set()
    for c in range(len(shop.micro_batches)):
        if shop.kind[c] == F:
            place = (shop.lane[c], shop.device[c])
            upper[c] = place in seen
            seen.add(place)
    return upper
