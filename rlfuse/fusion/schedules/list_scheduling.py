"""List scheduling: a whole schedule in the order of time, by priority rules; hundreds per second.

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
    """Over classes."""

    level: np.ndarray
    slope: np.ndarray
    pressure: np.ndarray
    quota: np.ndarray  # micro-batches that a forward class may hold
    patience: float  # how long a device may wait for something that matters more than what is ready


def fits(shop: Shop, limit: float) -> bool:
    """Whether a device can hold a micro-batch of each of its forward classes."""
    return bool(shop.acquires[shop.of_device].sum(axis=1).max() <= limit * (1 + TOLERANCE))


def round_trips(shop: Shop) -> np.ndarray:
    """Forward class -> time from its start to the end of its backward if nothing stood in its way, else 0."""
    tail, trip = chain_tails(shop), np.zeros(len(shop.micro_batches))
    trains = np.isin(shop.lane, shop.lane[shop.kind == B])
    for own in np.flatnonzero(trains & (shop.kind == F)):
        after = shop.after[backward_of(shop, own)]
        trip[own] = tail[own] - (0.0 if after == NONE else tail[after])
    return trip


def chain_tails(shop: Shop) -> np.ndarray:
    """Class -> time from the start of an operation to the end of its chain, if nothing else stood in its way."""
    tail = shop.duration.copy()
    for own in sorted(range(len(tail)), key=lambda own: (shop.kind[own] != W, -own)):
        for following in (shop.after[own], shop.leaf[own]):
            if following != NONE:
                tail[own] = max(tail[own], shop.duration[own] + shop.lag[following] + tail[following])
    return tail


@njit(cache=True)
def schedule(shop: Shop, limit: float, rules: Rules) -> tuple[np.ndarray, float]:
    """An order under the memory limit and its makespan. The limit has to hold one micro-batch of every forward class of
    a device (`fits`)."""
    devices, classes = shop.of_device.shape[0], len(shop.micro_batches)
    length = len(shop.class_of) // devices
    order, end = np.empty((devices, length), np.int64), np.empty(len(shop.class_of))
    begun, held = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    filled, free, room = np.zeros(devices, np.int64), np.zeros(devices), np.full(devices, limit * (1 + TOLERANCE))
    ready = np.full(classes, np.inf)  # when the data of a class's next operation are there
    for own in range(classes):
        if shop.before[own] == NONE:
            ready[own] = 0.0
    forward = _forwards(shop)
    next_start, next_class = np.full(devices, np.inf), np.full(devices, NONE)
    for each in range(devices):
        next_class[each], next_start[each] = _choose(shop, rules, each, begun, held, ready, 0.0, room[each])
    for _ in range(devices * length):
        device = np.argmin(next_start)
        own, start = next_class[device], next_start[device]
        micro_batch = begun[own]
        begun[own] += 1
        order[device, filled[device]] = shop.first[own] + micro_batch
        filled[device] += 1
        room[device] += shop.releases[own] - shop.acquires[own]
        held[own] += shop.kind[own] == F
        held[forward[own]] -= forward[own] != NONE
        free[device] = end[shop.first[own] + micro_batch] = start + shop.duration[own]
        _next_ready(shop, own, begun, ready, end)
        woken = device
        for following in (shop.leaf[own], shop.after[own]):
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
    """For a class that ends an activation's life the forward class that began it, else NONE. Forwards of a model that
    only scores end it themselves."""
    forward = np.full(len(shop.micro_batches), NONE)
    trains = np.zeros(len(shop.micro_batches), np.bool_)  # lane -> whether it has backwards
    trains[shop.lane[shop.kind == B]] = True
    for own in range(len(shop.micro_batches)):
        if shop.releases[own] > 0 or (shop.kind[own] != F and shop.leaf[own] == NONE):
            backward = shop.before[own] if shop.kind[own] == W else own
            at, steps = backward, 0
            while shop.kind[at] == B:
                at, steps = shop.before[at], steps + 1
            forward[own] = at - steps + 1
        elif not trains[shop.lane[own]]:
            forward[own] = own
    return forward


@njit(cache=True)
def _next_ready(shop: Shop, own: int, begun: np.ndarray, ready: np.ndarray, end: np.ndarray) -> None:
    before, micro_batch = shop.before[own], begun[own]
    if micro_batch == shop.micro_batches[own] or (before != NONE and begun[before] <= micro_batch):
        ready[own] = np.inf
    elif before != NONE:
        ready[own] = end[shop.first[before] + micro_batch] + shop.lag[own]


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
    """The class that a device runs next as things stand, and when; infinity where nothing can become ready."""
    for own in shop.of_device[device]:
        if shop.kind[own] == F and held[own] == 0 and begun[own] < shop.micro_batches[own]:
            room -= shop.acquires[own]
    earliest = np.inf
    for own in shop.of_device[device]:
        if ready[own] < earliest and _admitted(shop, rules, own, held, room):
            earliest = ready[own]
    earliest = max(earliest, free)
    chosen, best, start = NONE, -np.inf, np.inf
    if earliest == np.inf:
        return chosen, start
    for own in shop.of_device[device]:
        if ready[own] <= earliest + rules.patience and _admitted(shop, rules, own, held, room):
            wait = max(0.0, ready[own] - earliest)
            priority = rules.level[own] + rules.slope[own] * (shop.micro_batches[own] - 1 - begun[own]) - wait
            priority += rules.pressure[own] * held[own]
            if priority > best:
                chosen, best, start = own, priority, earliest + wait
    return chosen, start


@njit(cache=True, inline="always")
def _admitted(shop: Shop, rules: Rules, own: int, held: np.ndarray, room: float) -> bool:
    """Whether quota and memory let the class's next operation start; what it has reserved needs no room."""
    return shop.kind[own] != F or held[own] == 0 or (held[own] < rules.quota[own] and shop.acquires[own] <= room)


MAX_KEPT = 6
FRESH_SHARE = 0.3  # share of draws that owe nothing to those before
SHARED = 4
"""Settings that all pipelines share; then come bias, slope, pressure of each, and a quota where backwards are
whole: with W as a filler quotas gain nothing, and a larger space is searched more slowly."""
NO_QUOTA = 5.0  # quotas are exp(this) times what is in flight in a steady state


class Found(NamedTuple):
    """A schedule and how good it is."""

    score: tuple[float, ...]
    """Less is better; the last entry tells equals apart, later before earlier, so that plateaus are walked."""
    settings: np.ndarray
    order: np.ndarray
    makespan: float
    peak: float


class Draws:
    """List schedules whose rules get better by trying."""

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
        self,
        limit: float,
        score: Callable[[float, float], tuple[float, ...]],
        settings: np.ndarray | None = None,
    ) -> Found:
        """One more schedule under a memory limit, by these settings or by some at random. `score` of makespan and peak
        memory decides what is kept."""
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
        """Rank what is kept by another score."""
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
    """1 for forwards of a pipeline's second chunk on their device, else 0."""
    upper, seen = np.zeros(len(shop.micro_batches)), set()
    for own in range(len(shop.micro_batches)):
        if shop.kind[own] == F:
            place = (shop.lane[own], shop.device[own])
            upper[own] = place in seen
            seen.add(place)
    return upper
