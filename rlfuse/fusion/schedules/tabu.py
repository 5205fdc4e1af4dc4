"""Tabu search for a shorter schedule under a hard memory limit (Dell'Amico and Trubian 1993)."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.heads_tails import State, data_before, end_before, exchange, exchangeable, through
from rlfuse.fusion.schedules.shop import LOOSE, NONE, Shop
from rlfuse.fusion.schedules.timing import held_before


@njit(cache=True, nogil=True)
def tabu(
    shop: Shop, state: State, target: float, limit: float, steps: int, tenure: int, seed: int, stop: np.ndarray
) -> tuple[np.ndarray, float]:
    """The shortest order that `state` takes in so many steps, and its makespan; at `target` it stops,
    and when another thread sets `stop[0]`.

    No device ever holds more than `limit`. An exchange is not undone for `tenure` to twice as many steps, unless the
    longest path through the pair gets shorter than the best makespan.
    """
    np.random.seed(seed)
    held = held_before(shop, state.order)
    place_of = np.empty(len(shop.micro_batches), np.int64)  # of a class among those of its device
    for row in shop.of_device:
        place_of[row] = np.arange(len(row))
    until = np.zeros((len(shop.class_of), shop.of_device.shape[1]), np.int64)  # when it may pass one of a class again
    now = best = _longest(shop, state)
    order = state.order.copy()
    for step in range(steps):
        if stop[0]:
            break
        u, v = _chosen(shop, state, held, limit * (1 + LOOSE), until, place_of, step, now, best)
        if u == NONE:
            continue
        own, other = shop.class_of[u], shop.class_of[v]
        device, place = shop.device[own], state.position[u]
        held[device, place + 1] = held[device, place] + shop.acquires[other] - shop.releases[other]
        until[u, place_of[other]] = step + 1 + tenure + np.random.randint(tenure + 1)
        exchange(shop, state, u, v)
        now = _longest(shop, state)
        if now < best * (1 - LOOSE):
            best = now
            order[:] = state.order
            if best <= target * (1 + LOOSE):
                break
    return order, best


@njit(cache=True)
def _longest(shop: Shop, state: State) -> float:
    longest = 0.0
    for row in state.order:
        longest = max(longest, state.head[row[-1]] + shop.duration[shop.class_of[row[-1]]])
    return longest


@njit(cache=True)
def _chosen(
    shop: Shop,
    state: State,
    held: np.ndarray,
    limit: float,
    until: np.ndarray,
    place_of: np.ndarray,
    step: int,
    now: float,
    best: float,
) -> tuple[int, int]:
    """Of the pairs on a longest path the one through which paths are shortest once exchanged. Where all are tabu, the
    one that is so for the shortest time; NONE where memory and data leave none."""
    slack = LOOSE * now
    first, second, least = NONE, NONE, np.inf
    v = _any_last(shop, state, now - slack)
    while v != NONE:
        own, place = shop.class_of[v], state.position[v]
        data, ready = data_before(shop, state, v)
        by_device = end_before(shop, state, v) >= state.head[v] - slack and place > 0
        by_data = data != NONE and ready >= state.head[v] - slack
        u = state.order[shop.device[own], place - 1] if by_device else NONE
        fits = by_device and _fits(shop, held[shop.device[own], place - 1], u, v, limit)
        if fits and exchangeable(shop, state, u, v):
            cost = through(shop, state, u, v) + slack * np.random.random()  # equals at random
            free = until[v, place_of[shop.class_of[u]]]
            if free > step and cost > best:
                cost += free * now
            if cost < least:
                first, second, least = u, v, cost
        v = data if by_data and (not by_device or np.random.random() < 0.5) else u
    return first, second


@njit(cache=True)
def _any_last(shop: Shop, state: State, latest: float) -> int:
    """One of the operations that end last on their device, at this time at least."""
    chosen, seen = NONE, 0
    for row in state.order:
        if state.head[row[-1]] + shop.duration[shop.class_of[row[-1]]] >= latest:
            seen += 1
            if np.random.randint(seen) == 0:
                chosen = row[-1]
    return chosen


@njit(cache=True)
def _fits(shop: Shop, held: float, u: int, v: int, limit: float) -> bool:
    own, other = shop.class_of[u], shop.class_of[v]
    with_v = held + shop.acquires[other]
    return with_v <= limit and with_v - shop.releases[other] + shop.acquires[own] <= limit
