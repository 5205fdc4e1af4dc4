"""Start times and peak memory of an order, compiled for the search."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.problem import Problem
from rlfuse.fusion.schedules.schedule import Timed
from rlfuse.fusion.schedules.shop import NONE, Shop, compiled, operations


def planned(problem: Problem, order: np.ndarray) -> tuple[tuple[Timed, ...], ...]:
    """An order that isn't stuck, with names and earliest times."""
    shop, names = compiled(problem), operations(problem)
    begin = starts(shop, order)
    end = begin + shop.duration[shop.class_of]
    return tuple(
        tuple(map(Timed, [names[number] for number in row.tolist()], begin[row].tolist(), end[row].tolist()))
        for row in order
    )


@njit(cache=True)
def starts(shop: Shop, order: np.ndarray) -> np.ndarray:
    """Earliest start of every operation when devices run their rows as they stand; NaN where an order is stuck."""
    devices, length = order.shape
    begin = np.full(len(shop.class_of), np.nan)
    at, free = np.zeros(devices, np.int64), np.zeros(devices)
    waiting = np.ones(devices, np.bool_)
    moved = True
    while moved:
        moved = False
        for device in range(devices):
            if not waiting[device]:
                continue
            waiting[device] = False
            while at[device] < length:
                operation = order[device, at[device]]
                own = shop.class_of[operation]
                before, start = shop.before[own], free[device]
                if before != NONE:
                    previous = shop.first[before] + operation - shop.first[own]
                    ready = begin[previous] + shop.duration[before] + shop.lag[own]
                    if np.isnan(ready):
                        break
                    start = max(start, ready)
                begin[operation] = start
                free[device] = start + shop.duration[own]
                at[device] += 1
                moved = True
                if shop.after[own] != NONE:
                    waiting[shop.device[shop.after[own]]] = True
            # a device that stopped waits for a predecessor, whose device wakes it
    return begin


@njit(cache=True)
def makespan(shop: Shop, order: np.ndarray) -> float:
    """When the last operation ends; NaN where the order is stuck."""
    begin = starts(shop, order)
    longest = 0.0
    for operation in range(len(begin)):
        if np.isnan(begin[operation]):
            return np.nan
        longest = max(longest, begin[operation] + shop.duration[shop.class_of[operation]])
    return longest


@njit(cache=True)
def held_before(shop: Shop, order: np.ndarray) -> np.ndarray:
    """Memory that a device holds before each place of its row: [devices, operations of each + 1]."""
    devices, length = order.shape
    held = np.zeros((devices, length + 1))
    for device in range(devices):
        for place in range(length):
            own = shop.class_of[order[device, place]]
            held[device, place + 1] = held[device, place] + shop.acquires[own] - shop.releases[own]
    return held


@njit(cache=True)
def peak(shop: Shop, order: np.ndarray) -> float:
    """Most memory that a device holds at any time: it depends on the order alone."""
    most = 0.0
    for device in range(order.shape[0]):
        held = 0.0
        for operation in order[device]:
            own = shop.class_of[operation]
            held += shop.acquires[own]
            most = max(most, held)
            held -= shop.releases[own]
    return most
