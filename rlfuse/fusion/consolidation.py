"""Consolidate the generation tail onto few slots, once, below a threshold (RLHFuse, arXiv 2409.13221, NSDI '25).

When R_t samples are unfinished they move to the m* slots that hold the most of them, m* = max(ceil(R_t / BS_max),
ceil(R_t * KV per sample / KV per slot)), BS_max: largest batch of flat latency.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from rlfuse.fusion.decisions import Move, Slot, Snapshot
from rlfuse.fusion.states import SampleRecord, SampleState


def consolidate(view: Snapshot) -> list[Move]:
    """Empty all but m* slots, when few enough samples are left and more slots hold them."""
    limit = view.settings.threshold * view.settings.samples
    if view.waiting or not 0 < view.unfinished <= limit:
        return []
    count = slots_needed(view, limit)
    if len(view.generating) <= count:
        return []
    order = [slot for slot in view.slots if slot.load and slot.alive and not slot.drained]
    order.sort(key=lambda slot: (slot.rate, -slot.load, slot.index))
    return as_moves(view, spread(view, order[:count], order[count:]))


def spread(
    view: Snapshot, targets: Sequence[Slot], sources: Sequence[Slot]
) -> Iterator[tuple[SampleRecord, Slot, int]]:
    """Every sample of `sources` goes to the target with the fewest, as far as there is room: (sample, from, to)."""
    room = [(target.load, target.index) for target in targets]
    heapq.heapify(room)
    for source in sources:
        for sample in source.samples.values():
            load, target = room[0]
            if sample.state is not SampleState.LEAVING and load < view.costs.max_sequences:
                yield sample, source, target
                heapq.heapreplace(room, (load + 1, target))


def slots_needed(view: Snapshot, samples: float) -> int:
    """m*: how many slots can hold so many samples at (nearly) flat latency and in their KV caches."""
    costs = view.costs
    batch = costs.batch_within(view.settings.max_decode_slowdown * costs.step_base_s)
    each = view.context / max(1, view.in_flight)
    return max(1, ceil(samples / batch), ceil(samples * each / costs.kv_tokens))


def as_moves(view: Snapshot, chosen: Iterable[tuple[SampleRecord, Slot, int]]) -> list[Move]:
    """Make decisions of (sample, from, to); each sample is carried in the way that is faster for it."""
    batches = defaultdict(list)
    for sample, source, target in chosen:
        held = sample.group.prompt_tokens + source.tokens(sample, view.now, view.costs)
        batches[source.index, target, view.costs.carry(held)[0]].append(sample.id)
    return [Move(tuple(names), source, target, carry) for (source, target, carry), names in batches.items()]
