"""Assignment of sequences to ranks and micro-batches: pure functions of lengths.

Role: called by `sequence_parallel_packing` and pipelines before every pass. Invariants: every sequence lands in exactly
one place; a micro-batch stays within the token budget unless it is a single longer sequence.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence


def balance(lengths: Sequence[int], ranks: int, rates: Sequence[float] = ()) -> list[list[int]]:
    """Return indices by rank, balanced by predicted end time: longest first, each to the rank that ends it first
    (Graham 1969).

    `rates`: slowdown factor of each rank; empty: equal, which balances tokens.
    """
    heaps: dict[float, list[tuple[float, int]]] = defaultdict(list)  # rate -> (end, rank)
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
    """Return indices by micro-batch: first-fit decreasing under the token budget and sequence limit.

    `sequences`: number of sequences of each index; one by default.
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
    """Return row indices as [pipeline][micro-batch][row]: `count` micro-batches per pipeline, of nearly equal tokens.

    `rates`: slowdown factor of each pipeline, as for `balance`. If long rows make micro-batches unequal, the small ones
    come first and last, which shortens the fill and drain phases (data-aware order, DistTrain, arXiv 2408.04275);
    gradients are sums, so the order does not change them.

    Example: lengths 9, 5, 4, 1 on 1 pipeline in 3 micro-batches -> [[[1], [0], [2, 3]]].
    """
    shares = balance(lengths, pipelines, rates)
    return [
        [[share[i] for i in bin] for bin in _small_at_both_ends([lengths[i] for i in share], count)] for share in shares
    ]


def _small_at_both_ends(lengths: Sequence[int], count: int) -> list[list[int]]:
    ascending = sorted(balance(lengths, count), key=lambda bin: sum(lengths[i] for i in bin))
    return ascending[::2] + ascending[1::2][::-1]
