"""A proven lower bound on the makespan of a problem, whatever the memory.

Proof. r bounds an operation's start from below (head), q the time from its end to the makespan (tail).

1. Data: r(c, m) >= r(c', m) + p(c') + lag(c) for c' = before[c]; the same for tails with time reversed.
2. One machine: for a class c and classes K of its lane on its device that are ancestors of c or c itself,
       r(c, m) >= max over j <= m of  min_k r(k, j) + (m - j + 1) * sum of p(k), k in K  - p(c),
   as the device runs micro-batches j .. m of K before (c, m) ends, first in, first out.
3. Device: its operations with heads and tails are a one-machine problem; its preemptive optimum (Jackson) is a bound.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit

from rlfuse.fusion.schedules.problem import Problem
from rlfuse.fusion.schedules.shop import NONE, Shop, W, compile_problem


def lower_bound(problem: Problem) -> float:
    """Makespan that no schedule of the problem beats, in its unit of time."""
    return bound(compile_problem(problem))


def bound(shop: Shop) -> float:
    """The same for compiled problems."""
    head, tail = heads(shop), tails(shop)
    machines = (
        (
            np.concatenate([head[k] for k in classes]),
            np.repeat(shop.duration[classes], shop.micro_batches[classes]),
            np.concatenate([tail[k] for k in classes]),
        )
        for classes in shop.of_device
    )
    return max(_jackson(*machine) for machine in machines)


def heads(shop: Shop) -> list[np.ndarray]:
    """Class -> r of its micro-batches."""
    head: list[np.ndarray] = []
    for own in range(len(shop.micro_batches)):
        before = shop.before[own]
        release = np.zeros(shop.micro_batches[own])
        if before != NONE:
            release = head[before] + shop.duration[before] + shop.lag[own]
        head.append(release)
        line = _ancestors(shop, own)
        for i in range(len(line)):
            head[own] = _one_machine(shop, line[i:], own, head)
    return head


def tails(shop: Shop) -> list[np.ndarray]:
    """Class -> q of its micro-batches."""
    back: dict[int, np.ndarray] = {}  # reversed in time: micro-batch M-1-m comes m-th
    for own in sorted(range(len(shop.micro_batches)), key=lambda own: (shop.kind[own] != W, -own)):
        release = np.zeros(shop.micro_batches[own])
        for following in (shop.after[own], shop.leaf[own]):
            if following != NONE:
                release = np.maximum(release, back[following] + shop.duration[following] + shop.lag[following])
        back[own] = release
        line = _descendants(shop, own)
        leaves = [shop.leaf[k] for k in line if shop.leaf[k] != NONE]
        for i in range(len(line)):
            back[own] = _one_machine(shop, line[i:], own, back)
        if leaves:
            back[own] = _one_machine(shop, leaves + line, own, back)
    return [back[own][::-1] for own in range(len(shop.micro_batches))]


def _chain(shop: Shop, own: int) -> list[int]:
    """F and B of its lane on its device, first to last: classes are numbered along the chain."""
    beside = shop.of_device[shop.device[own]]
    return beside[(shop.lane[beside] == shop.lane[own]) & (shop.kind[beside] != W)].tolist()


def _ancestors(shop: Shop, own: int) -> list[int]:
    """Classes of its lane on its device from which it follows, and itself, first to last."""
    leaf = shop.kind[own] == W
    last = shop.before[own] if leaf else own
    return [k for k in _chain(shop, own) if k <= last] + ([own] if leaf else [])


def _descendants(shop: Shop, own: int) -> list[int]:
    """Classes of the chain on its device that follow from it, and itself, last to first."""
    return [own] if shop.kind[own] == W else [k for k in reversed(_chain(shop, own)) if k >= own]


def _one_machine(
    shop: Shop, together: list[int], own: int, release: list[np.ndarray] | dict[int, np.ndarray]
) -> np.ndarray:
    work = sum(shop.duration[k] for k in together)
    batches = np.arange(shop.micro_batches[own])
    earliest = np.minimum.reduce([release[k] for k in together])
    least = np.maximum.accumulate(earliest - batches * work) + (batches + 1) * work - shop.duration[own]
    return np.maximum(release[own], least)


@njit(cache=True)
def _jackson(release: np.ndarray, left: np.ndarray, delivery: np.ndarray) -> float:
    """Step 3 of the proof for one device: heads, durations (which are used up) and tails of its operations."""
    coming = np.argsort(release, kind="mergesort")
    ready = [(0.0, 0) for _ in range(0)]  # the type of its entries, for the compiler
    now = best = 0.0
    position = 0
    while position < len(coming) or len(ready):
        if not len(ready):
            now = max(now, release[coming[position]])
        while position < len(coming) and release[coming[position]] <= now:
            heapq.heappush(ready, (-delivery[coming[position]], coming[position]))
            position += 1
        key, running = ready[0]
        until = release[coming[position]] if position < len(coming) else np.inf
        if now + left[running] <= until:
            heapq.heappop(ready)
            now += left[running]
            best = max(best, now - key)
        else:
            left[running] -= until - now
            now = until
    return best
