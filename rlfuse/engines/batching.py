"""Which sequence goes to which rank and micro-batch: pure functions of lengths.

Role: called by the trainer group before every pass. Invariants: every sequence lands in exactly one micro-batch; every
rank gets the same number of micro-batches (collectives inside a pass need it), so some may be empty; a micro-batch
keeps within the token budget unless it is one sequence that is longer than the budget by itself.
"""

from __future__ import annotations

import heapq
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


def pack(lengths: Sequence[int], token_budget: int, max_sequences: int | None = None) -> list[list[int]]:
    """Indices per micro-batch: first-fit decreasing under the token budget (and sequence limit)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[index] <= free and (max_sequences is None or len(bins[b]) < max_sequences):
                break
        else:
            b = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[b].append(index)
        room[b] -= lengths[index]
    return bins


def micro_batches(
    lengths: Sequence[int], ranks: int, token_budget: int, max_sequences: int | None = None
) -> list[list[list[int]]]:
    """Row indices as [rank][micro-batch][row]; the same number of micro-batches on every rank, possibly empty ones.

    Example: lengths 9, 5, 4, 1 on 2 ranks with a budget of 9 -> [[[0], [3]], [[1, 2], []]] or its like.
    """
    shares = balance(lengths, ranks)
    packed = [
        [[share[i] for i in bin] for bin in pack([lengths[i] for i in share], token_budget, max_sequences)]
        for share in shares
    ]
    most = max(map(len, packed))
    return [bins + [[] for _ in range(most - len(bins))] for bins in packed]
