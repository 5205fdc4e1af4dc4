"""Heads and tails of an order, kept exact while neighbours on a device are exchanged: a new makespan is O(1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.shop import NONE, Shop
from rlfuse.fusion.schedules.timing import starts


class State(NamedTuple):
    """An order with its heads and tails."""

    order: np.ndarray
    position: np.ndarray  # operation -> place in its device's row
    head: np.ndarray
    tail: np.ndarray
    queue: np.ndarray  # operations to look at again; a ring
    queued: np.ndarray


@njit(cache=True)
def state_of(shop: Shop, order: np.ndarray) -> State:
    """For an order that isn't stuck."""
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
    """The data predecessor, or NONE, and when its result is there."""
    own = shop.class_of[operation]
    before = shop.before[own]
    if before == NONE:
        return NONE, 0.0
    previous = shop.first[before] + operation - shop.first[own]
    return previous, state.head[previous] + shop.duration[before] + shop.lag[own]


@njit(cache=True)
def end_before(shop: Shop, state: State, operation: int) -> float:
    """End of what the device runs before it."""
    own = shop.class_of[operation]
    place = state.position[operation]
    if place == 0:
        return 0.0
    previous = state.order[shop.device[own], place - 1]
    return state.head[previous] + shop.duration[shop.class_of[previous]]


@njit(cache=True)
def data_tail(shop: Shop, state: State, operation: int) -> float:
    """Longest path behind an operation over those that need its result."""
    own = shop.class_of[operation]
    longest = 0.0
    for following in (shop.after[own], shop.leaf[own]):
        if following != NONE:
            later = shop.first[following] + operation - shop.first[own]
            longest = max(longest, shop.lag[following] + shop.duration[following] + state.tail[later])
    return longest


@njit(cache=True)
def device_tail(shop: Shop, state: State, operation: int) -> float:
    """Longest path behind an operation over what its device runs next."""
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
    """Whether v may run before u, its neighbour, without a cycle: no path leads from u to v but the direct one."""
    own, other = shop.class_of[u], shop.class_of[v]
    if own == other:
        return False
    previous, _ = data_before(shop, state, v)
    if previous == u:
        return False
    if previous == NONE:
        return True
    for following in (shop.after[own], shop.leaf[own]):
        if following != NONE:
            later = shop.first[following] + u - shop.first[own]
            if state.head[previous] >= state.head[later]:
                return False
    return True


@njit(cache=True)
def through(shop: Shop, state: State, u: int, v: int) -> float:
    """Longest path through u or v once v runs before u."""
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
    """Let v run before u, and bring all heads and tails up to date."""
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
        own = shop.class_of[operation]
        _, ready = data_before(shop, state, operation)
        head = max(ready, end_before(shop, state, operation))
        if head == state.head[operation]:
            continue
        state.head[operation] = head
        place = state.position[operation] + 1
        later = state.order[shop.device[own], place] if place < length else NONE
        for following in (shop.after[own], shop.leaf[own]):
            if following != NONE:
                left = _push(state, read, left, shop.first[following] + operation - shop.first[own])
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
        own = shop.class_of[operation]
        tail = _tail(shop, state, operation)
        if tail == state.tail[operation]:
            continue
        state.tail[operation] = tail
        if shop.before[own] != NONE:
            left = _push(state, read, left, shop.first[shop.before[own]] + operation - shop.first[own])
        place = state.position[operation]
        if place > 0:
            left = _push(state, read, left, state.order[shop.device[own], place - 1])


@njit(cache=True)
def _push(state: State, read: int, left: int, operation: int) -> int:
    """Queue an operation unless it is queued; the new length of the queue."""
    if state.queued[operation]:
        return left
    state.queued[operation] = True
    state.queue[(read + left) % len(state.queue)] = operation
    return left + 1
