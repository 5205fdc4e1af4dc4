"""Local search over orders: tabu search and annealing. Heads and tails stay exact, so a new makespan is O(1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.shop import NONE, TOLERANCE, Shop, held_before, starts


class State(NamedTuple):
    """An order with its heads and tails."""

    order: np.ndarray
    position: np.ndarray  # operation -> place in its device's row
    head: np.ndarray
    tail: np.ndarray
    queue: np.ndarray  # operations to update; a ring buffer
    queued: np.ndarray


@njit(cache=True)
def state_of(shop: Shop, order: np.ndarray) -> State:
    """Return the state of an order without deadlock."""
    size = len(shop.class_of)
    position = np.empty(size, np.int64)
    for device in range(order.shape[0]):
        for place in range(order.shape[1]):
            position[order[device, place]] = place
    state = State(
        order.copy(), position, starts(shop, order), np.zeros(size), np.empty(size, np.int64), np.zeros(size, np.bool_)
    )
    for operation in np.argsort(-state.head):
        state.tail[operation] = _tail(shop, state, operation)
    return state


@njit(cache=True)
def data_before(shop: Shop, state: State, operation: int) -> tuple[int, float]:
    """Return the data predecessor (or NONE) and the time when its result is available."""
    c = shop.class_of[operation]
    before = shop.before[c]
    if before == NONE:
        return NONE, 0.0
    previous = shop.first[before] + operation - shop.first[c]
    return previous, state.head[previous] + shop.duration[before] + shop.lag[c]


@njit(cache=True)
def end_before(shop: Shop, state: State, operation: int) -> float:
    """Return the end of the previous operation on the device."""
    c = shop.class_of[operation]
    place = state.position[operation]
    if place == 0:
        return 0.0
    previous = state.order[shop.device[c], place - 1]
    return state.head[previous] + shop.duration[shop.class_of[previous]]


@njit(cache=True)
def data_tail(shop: Shop, state: State, operation: int) -> float:
    """Return the longest path after an operation through the operations that need its result."""
    c = shop.class_of[operation]
    longest = 0.0
    for following in (shop.after[c], shop.leaf[c]):
        if following != NONE:
            later = shop.first[following] + operation - shop.first[c]
            longest = max(longest, shop.lag[following] + shop.duration[following] + state.tail[later])
    return longest


@njit(cache=True)
def device_tail(shop: Shop, state: State, operation: int) -> float:
    """Return the longest path after an operation through the next operation of its device."""
    device = shop.device[shop.class_of[operation]]
    place = state.position[operation] + 1
    if place == state.order.shape[1]:
        return 0.0
    later = state.order[device, place]
    return shop.duration[shop.class_of[later]] + state.tail[later]


@njit(cache=True)
def _tail(shop: Shop, state: State, operation: int) -> float:
    return max(data_tail(shop, state, operation), device_tail(shop, state, operation))


@njit(cache=True)
def exchangeable(shop: Shop, state: State, u: int, v: int) -> bool:
    """Return whether neighbours u and v can be exchanged without a cycle: no indirect path leads from u to v."""
    c, other = shop.class_of[u], shop.class_of[v]
    if c == other:
        return False
    previous, _ = data_before(shop, state, v)
    if previous == u:
        return False
    if previous == NONE:
        return True
    for following in (shop.after[c], shop.leaf[c]):
        if following != NONE:
            later = shop.first[following] + u - shop.first[c]
            if state.head[previous] >= state.head[later]:
                return False
    return True


@njit(cache=True)
def through(shop: Shop, state: State, u: int, v: int) -> float:
    """Return the longest path through u or v once v runs before u."""
    long_u, long_v = shop.duration[shop.class_of[u]], shop.duration[shop.class_of[v]]
    _, ready_u = data_before(shop, state, u)
    _, ready_v = data_before(shop, state, v)
    head_v = max(end_before(shop, state, u), ready_v)
    head_u = max(head_v + long_v, ready_u)
    tail_u = max(device_tail(shop, state, v), data_tail(shop, state, u))
    tail_v = max(long_u + tail_u, data_tail(shop, state, v))
    return max(head_v + long_v + tail_v, head_u + long_u + tail_u)


@njit(cache=True)
def exchange(shop: Shop, state: State, u: int, v: int) -> None:
    """Exchange u and v so that v runs first, and update all heads and tails."""
    device, place = shop.device[shop.class_of[u]], state.position[u]
    state.order[device, place], state.order[device, place + 1] = v, u
    state.position[v], state.position[u] = place, place + 1
    _update_heads(shop, state, u, v)
    _update_tails(shop, state, u, v)


@njit(cache=True)
def _update_heads(shop: Shop, state: State, u: int, v: int) -> None:
    size, length = len(state.queue), state.order.shape[1]
    state.queue[0], state.queue[1] = v, u
    state.queued[v] = state.queued[u] = True
    read, left = 0, 2
    if state.position[u] + 1 < length:
        later = state.order[shop.device[shop.class_of[u]], state.position[u] + 1]
        state.queue[2] = later
        state.queued[later] = True
        left = 3
    while left:
        operation = state.queue[read]
        read, left = (read + 1) % size, left - 1
        state.queued[operation] = False
        c = shop.class_of[operation]
        _, ready = data_before(shop, state, operation)
        head = max(ready, end_before(shop, state, operation))
        if head == state.head[operation]:
            continue
        state.head[operation] = head
        place = state.position[operation] + 1
        later = state.order[shop.device[c], place] if place < length else NONE
        for following in (shop.after[c], shop.leaf[c]):
            if following != NONE:
                left = _push(state, read, left, shop.first[following] + operation - shop.first[c])
        if later != NONE:
            left = _push(state, read, left, later)


@njit(cache=True)
def _update_tails(shop: Shop, state: State, u: int, v: int) -> None:
    size = len(state.queue)
    state.queue[0], state.queue[1] = u, v
    state.queued[v] = state.queued[u] = True
    read, left = 0, 2
    if state.position[v] > 0:
        earlier = state.order[shop.device[shop.class_of[v]], state.position[v] - 1]
        state.queue[2] = earlier
        state.queued[earlier] = True
        left = 3
    while left:
        operation = state.queue[read]
        read, left = (read + 1) % size, left - 1
        state.queued[operation] = False
        c = shop.class_of[operation]
        tail = _tail(shop, state, operation)
        if tail == state.tail[operation]:
            continue
        state.tail[operation] = tail
        if shop.before[c] != NONE:
            left = _push(state, read, left, shop.first[shop.before[c]] + operation - shop.first[c])
        place = state.position[operation]
        if place > 0:
            left = _push(state, read, left, state.order[shop.device[c], place - 1])


@njit(cache=True)
def _push(state: State, read: int, left: int, operation: int) -> int:
    """Queue an operation unless it is queued, and return the new length of the queue."""
    if state.queued[operation]:
        return left
    state.queued[operation] = True
    state.queue[(read + left) % len(state.queue)] = operation
    return left + 1


@njit(cache=True, nogil=True)
def tabu(
    shop: Shop, state: State, target: float, limit: float, steps: int, tenure: int, seed: int, stop: np.ndarray
) -> tuple[np.ndarray, float]:
    """Run tabu search from `state` and return the shortest order found and its makespan.

    It stops after `steps`, at makespan `target`, or when another thread sets `stop[0]`. No device ever holds more than
    `limit`. An exchange is not undone for `tenure` to 2 * `tenure` steps, unless the longest path through the pair
    becomes shorter than the best makespan.
    """
    np.random.seed(seed)
    held = held_before(shop, state.order)
    place_of = np.empty(len(shop.micro_batches), np.int64)  # position of a class among those of its device
    for row in shop.of_device:
        place_of[row] = np.arange(len(row))
    until = np.zeros((len(shop.class_of), shop.of_device.shape[1]), np.int64)  # (operation, class) -> end of its tabu
    now = best = _longest(shop, state)
    order = state.order.copy()
    for step in range(steps):
        if stop[0]:
            break
        u, v = _chosen(shop, state, held, limit * (1 + TOLERANCE), until, place_of, step, now, best)
        if u == NONE:
            continue
        c, other = shop.class_of[u], shop.class_of[v]
        device, place = shop.device[c], state.position[u]
        held[device, place + 1] = held[device, place] + shop.acquires[other] - shop.releases[other]
        until[u, place_of[other]] = step + 1 + tenure + np.random.randint(tenure + 1)
        exchange(shop, state, u, v)
        now = _longest(shop, state)
        if now < best * (1 - TOLERANCE):
            best = now
            order[:] = state.order
            if best <= target * (1 + TOLERANCE):
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
    """Return the pair on a longest path whose exchange gives the shortest paths.

    If all pairs are tabu, return the one that is tabu for the shortest time; NONE if memory and data allow no exchange.
    """
    slack = TOLERANCE * now
    first, second, least = NONE, NONE, np.inf
    v = _any_last(shop, state, now - slack)
    while v != NONE:
        c, place = shop.class_of[v], state.position[v]
        data, ready = data_before(shop, state, v)
        by_device = end_before(shop, state, v) >= state.head[v] - slack and place > 0
        by_data = data != NONE and ready >= state.head[v] - slack
        u = state.order[shop.device[c], place - 1] if by_device else NONE
        fits = by_device and _fits(shop, held[shop.device[c], place - 1], u, v, limit)
        if fits and exchangeable(shop, state, u, v):
            cost = through(shop, state, u, v) + slack * np.random.random()  # break ties at random
            free = until[v, place_of[shop.class_of[u]]]
            if free > step and cost > best:
                cost += free * now
            if cost < least:
                first, second, least = u, v, cost
        v = data if by_data and (not by_device or np.random.random() < 0.5) else u
    return first, second


@njit(cache=True)
def _any_last(shop: Shop, state: State, latest: float) -> int:
    """Return a random operation among the last ones of their devices that end at `latest` or later."""
    chosen, seen = NONE, 0
    for row in state.order:
        if state.head[row[-1]] + shop.duration[shop.class_of[row[-1]]] >= latest:
            seen += 1
            if np.random.randint(seen) == 0:
                chosen = row[-1]
    return chosen


@njit(cache=True)
def _fits(shop: Shop, held: float, u: int, v: int, limit: float) -> bool:
    c, other = shop.class_of[u], shop.class_of[v]
    with_v = held + shop.acquires[other]
    return with_v <= limit and with_v - shop.releases[other] + shop.acquires[c] <= limit


COOLING = ((0.3, 0.03), (0.5, 0.1), (1.5, 0.1))
"""Pairs of initial and final temperature, in units of the largest activation of a micro-batch. They are tried in order,
since none of them is best on all instances."""

EDGE = 0.5
"""Extra energy of a forward above the goal, in activations. Sizes of several models can add up to sums just above a
goal, whose excess alone would be too small for any temperature."""


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
    """Anneal `state` until no device holds more than `goal`, and return the remaining energy.

    It also stops after `proposals`, or when another thread sets `stop[0]`. No intermediate order has a makespan above
    `longest`.
    """
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
        c, other = shop.class_of[u], shop.class_of[v]
        if c == other:
            continue
        held, gets_u, gets_v = before[device, place], shop.acquires[c], shop.acquires[other]
        between, new_between = held + gets_u - shop.releases[c], held + gets_v - shop.releases[other]
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
    """Return the energy of a forward that acquires `gets`: 0 within the goal, else its excess plus the edge."""
    above = held + gets - goal * (1 + TOLERANCE)
    return above + edge if gets > 0 and above > 0 else 0.0


@njit(cache=True)
def _energy(shop: Shop, state: State, before: np.ndarray, goal: float, edge: float) -> float:
    energy = 0.0
    for device in range(len(before)):
        for place, operation in enumerate(state.order[device]):
            energy += _excess(before[device, place], shop.acquires[shop.class_of[operation]], goal, edge)
    return energy
