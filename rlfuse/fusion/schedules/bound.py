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
    """Return a lower bound on the makespan of the problem, in its unit of time."""
    return bound(compile_problem(problem))


def bound(shop: Shop) -> float:
    """Return the lower bound of a compiled problem."""
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
    """Return class -> r of its micro-batches."""
    head: list[np.ndarray] = []
    for c in range(len(shop.micro_batches)):
        before = shop.before[c]
        release = np.zeros(shop.micro_batches[c])
        if before != NONE:
            release = head[before] + shop.duration[before] + shop.lag[c]
        head.append(release)
        line = _ancestors(shop, c)
        for i in range(len(line)):
            head[c] = _one_machine(shop, line[i:], c, head)
    return head


def tails(shop: Shop) -> list[np.ndarray]:
    """Return class -> q of its micro-batches."""
    back: dict[int, np.ndarray] = {}  # reversed in time: micro-batch M-1-m comes m-th
    for c in sorted(range(len(shop.micro_batches)), key=lambda c: (shop.kind[c] != W, -c)):
        release = np.zeros(shop.micro_batches[c])
        for following in (shop.after[c], shop.leaf[c]):
            if following != NONE:
                release = np.maximum(release, back[following] + shop.duration[following] + shop.lag[following])
        back[c] = release
        line = _descendants(shop, c)
        leaves = [shop.leaf[k] for k in line if shop.leaf[k] != NONE]
        for i in range(len(line)):
            back[c] = _one_machine(shop, line[i:], c, back)
        if leaves:
            back[c] = _one_machine(shop, leaves + line, c, back)
    return [back[c][::-1] for c in range(len(shop.micro_batches))]


def _chain(shop: Shop, c: int) -> list[int]:
    """Return the F and B classes of its lane on its device, in order: classes are numbered along the chain."""
    on_device = shop.of_device[shop.device[c]]
    return on_device[(shop.lane[on_device] == shop.lane[c]) & (shop.kind[on_device] != W)].tolist()


def _ancestors(shop: Shop, c: int) -> list[int]:
    """Return the ancestors of a class in its lane on its device, and the class itself, first to last."""
    leaf = shop.kind[c] == W
    last = shop.before[c] if leaf else c
    return [k for k in _chain(shop, c) if k <= last] + ([c] if leaf else [])


def _descendants(shop: Shop, c: int) -> list[int]:
    """Return the descendants of a class in the chain on its device, and the class itself, last to first."""
    return [c] if shop.kind[c] == W else [k for k in reversed(_chain(shop, c)) if k >= c]


def _one_machine(
    shop: Shop, together: list[int], c: int, release: list[np.ndarray] | dict[int, np.ndarray]
) -> np.ndarray:
    work = sum(shop.duration[k] for k in together)
    batches = np.arange(shop.micro_batches[c])
    earliest = np.minimum.reduce([release[k] for k in together])
    least = np.maximum.accumulate(earliest - batches * work) + (batches + 1) * work - shop.duration[c]
    return np.maximum(release[c], least)


@njit(cache=True)
def _jackson(release: np.ndarray, left: np.ndarray, delivery: np.ndarray) -> float:
    """Return the Jackson bound of one device (step 3) from heads, durations (modified in place) and tails."""
    coming = np.argsort(release, kind="mergesort")
    ready = [(0.0, 0) for _ in range(0)]  # empty list with the type of its entries, for numba
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
