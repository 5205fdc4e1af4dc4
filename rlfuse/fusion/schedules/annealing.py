"""Simulated annealing of peak memory under a hard makespan limit, by exchanging neighbours on a device."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.heads_tails import State, exchange, exchangeable, through
from rlfuse.fusion.schedules.shop import LOOSE, Shop
from rlfuse.fusion.schedules.timing import held_before

COOLING = ((0.3, 0.03), (0.5, 0.1), (1.5, 0.1))
"""Pairs of first and last temperature, in units of the largest activation of a micro-batch.

Which of them gets stuck on an instance is chance, so a search tries one after the other."""

EDGE = 0.5
"""Beside what it holds above the goal every forward costs so much more of an activation: sizes of several models add up
to sums just above a goal, which no temperature would see."""


@njit(cache=True, nogil=True)
def anneal(
    shop: Shop,
    state: State,
    longest: float,
    goal: float,
    proposals: int,
    hot: float,
    cold: float,
    seed: int,
    stop: np.ndarray,
) -> float:
    """Change `state` until no device holds more than `goal`, or proposals run out; returns the energy left. It ends,
    too, when another thread sets `stop[0]`. No order on the way has a makespan above `longest`."""
    np.random.seed(seed)
    devices, length = state.order.shape
    edge = EDGE * shop.acquires.max()
    before = held_before(shop, state.order)
    energy = _energy(shop, state, before, goal, edge)
    if energy == 0 or length < 2:
        return energy
    cooling = (cold / hot) ** (1.0 / max(1, proposals))
    temperature = hot
    for _ in range(proposals):
        if stop[0]:
            break
        temperature *= cooling
        device, place = np.random.randint(devices), np.random.randint(length - 1)
        u, v = state.order[device, place], state.order[device, place + 1]
        own, other = shop.class_of[u], shop.class_of[v]
        if own == other:
            continue
        held, gets_u, gets_v = before[device, place], shop.acquires[own], shop.acquires[other]
        between, new_between = held + gets_u - shop.releases[own], held + gets_v - shop.releases[other]
        change = _excess(held, gets_v, goal, edge) + _excess(new_between, gets_u, goal, edge)
        change -= _excess(held, gets_u, goal, edge) + _excess(between, gets_v, goal, edge)
        if change > 0 and np.random.random() >= np.exp(-change / temperature):
            continue
        if not exchangeable(shop, state, u, v) or through(shop, state, u, v) > longest:
            continue
        exchange(shop, state, u, v)
        before[device, place + 1] = new_between
        energy += change
        if energy < 1e-9 * goal:
            return 0.0
    return energy


@njit(cache=True)
def _excess(held: float, gets: float, goal: float, edge: float) -> float:
    """What a forward that gets so much costs: 0 within the goal, else what is above it and the edge."""
    above = held + gets - goal * (1 + LOOSE)
    return above + edge if gets > 0 and above > 0 else 0.0


@njit(cache=True)
def _energy(shop: Shop, state: State, before: np.ndarray, goal: float, edge: float) -> float:
    energy = 0.0
    for device in range(len(before)):
        for place, operation in enumerate(state.order[device]):
            energy += _excess(before[device, place], shop.acquires[shop.class_of[operation]], goal, edge)
    return energy
