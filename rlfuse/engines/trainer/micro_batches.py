"""Which sequence goes to which rank and micro-batch: pure functions of lengths.

Role: `degrees` and pipelines call them before every pass. Invariants: every sequence lands in exactly one place; a
micro-batch keeps within the token budget unless it is one sequence that is longer than the budget by itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices per rank with nearly equal token sums: longest first, each to the least loaded rank (Graham 1969)."""
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
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


def split_evenly(lengths: Sequence[int], pipelines: int, count: int) -> list[list[list[int]]]:
    """Row indices as [pipeline][micro-batch][row]: `count` micro-batches for each pipeline, of nearly equal tokens.

    Example: lengths 9, 5, 4, 1 on 1 pipeline in 2 micro-batches -> [[[0, 3], [1, 2]]].
    """
    shares = balance(lengths, pipelines)
    return [[[share[i] for i in bin] for bin in balance([lengths[i] for i in share], count)] for share in shares]
