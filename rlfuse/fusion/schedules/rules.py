"""Draw random priority rules for list scheduling, and neighbours of the best of them."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlfuse.fusion.schedules.list_scheduling import Rules, chain_tails, round_trips, schedule
from rlfuse.fusion.schedules.shop import B, F, Shop, W
from rlfuse.fusion.schedules.timing import peak

KEPT = 6
FRESH = 0.3  # share of draws that owe nothing to those before
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
            fresh = len(self.best) < KEPT or self.rng.random() < FRESH
            settings = self._fresh() if fresh else self._changed(self._chosen())
        order, makespan = schedule(self.shop, limit, self._rules(settings))
        most = peak(self.shop, order)
        found = Found((*score(makespan, most), -self.drawn), settings, order, makespan, most)
        bisect.insort(self.best, found, key=lambda each: each.score)
        del self.best[KEPT:]
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
