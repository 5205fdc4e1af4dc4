"""Which sequence goes to which rank and micro-batch: pure functions of lengths.

Role: `degrees` and pipelines call them before every pass. Invariants: every sequence lands in exactly one place; a
micro-batch keeps within the token budget unless it is one sequence that is longer than the budget by itself.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence


def balance(lengths: Sequence[int], ranks: int, rates: Sequence[float] = ()) -> list[list[int]]:
    """Indices per rank that end at nearly the same time: longest first, each to who would end it first (Graham 1969).

    `rates`: how many times longer than expected each rank takes; none: all alike, which balances tokens.
    """
    heaps: dict[float, list[tuple[float, int]]] = defaultdict(list)  # of ranks that are alike: when each ends
    for rank, rate in enumerate(rates or [1.0] * ranks):
        heaps[rate].append((0.0, rank))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        rate = min(heaps, key=lambda rate: heaps[rate][0][0] + rate * length)
        end, rank = heaps[rate][0]
        heapq.heapreplace(heaps[rate], (end + rate * length, rank))
        shares[rank].append(index)
    return shares


def pack(
    lengths: Sequence[int], token_budget: int, max_sequences: int | None = None, sequences: Sequence[int] | None = None
) -> list[list[int]]:
    """Indices per micro-batch: first-fit decreasing under the token budget (and sequence limit).

    `sequences`: how many each index stands for; one by default.
    """
    bins: list[list[int]] = []
    room: list[list[float]] = []  # tokens and sequences that still fit
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index], sequences[index] if sequences else 1
        b = next((b for b, free in enumerate(room) if size[0] <= free[0] and size[1] <= free[1]), len(bins))
        if b == len(bins):
            bins.append([])
            room.append([token_budget, max_sequences or math.inf])
        bins[b].append(index)
        room[b] = [left - taken for left, taken in zip(room[b], size, strict=True)]
    return bins


def split_evenly(
    lengths: Sequence[int], pipelines: int, count: int, rates: Sequence[float] = ()
) -> list[list[list[int]]]:
    """Row indices as [pipeline][micro-batch][row]: `count` micro-batches for each pipeline, of nearly equal tokens.

    `rates`: of each pipeline, as for `balance`; a slow one's micro-batches are smaller. Where long rows keep
    micro-batches from being equal, the small ones are at both ends: stages wait for the first ones to come and for the
    last ones to go (data-aware order, DistTrain, arXiv 2408.04275). Gradients are sums, whatever the order.

    Example: lengths 9, 5, 4, 1 on 1 pipeline in 3 micro-batches -> [[[1], [0], [2, 3]]].
    """
    shares = balance(lengths, pipelines, rates)
    return [
        [[share[i] for i in bin] for bin in _small_at_both_ends([lengths[i] for i in share], count)] for share in shares
    ]


def _small_at_both_ends(lengths: Sequence[int], count: int) -> list[list[int]]:
    ascending = sorted(balance(lengths, count), key=lambda bin: sum(lengths[i] for i in bin))
    return ascending[::2] + ascending[1::2][::-1]
