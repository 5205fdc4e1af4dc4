"""RLHFuse's consolidation of the generation tail: once, below a threshold, onto few slots.

Role: called by `policies.rlhfuse`. Source: "Optimizing RLHF Training for Large Language Models with Stage Fusion"
(RLHFuse, arXiv 2409.13221, NSDI '25): when R_t samples are unfinished, they are put on m* slots,

    m* = max(ceil(R_t / BS_max), ceil(R_t * KV per sample / KV per slot)),    BS_max: largest batch of flat latency,

namely on those with the most samples left, since then the least has to move (slow slots come last). R_t, and how flat
is flat enough where latency grows with every sample (`stretch`), are tuned by simulating the lengths that the last
steps recorded (`rlfuse.simulate.tuning`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from rlfuse.fusion.decisions import Move, Slot, Snapshot
from rlfuse.fusion.states import SampleRecord, SampleState

SLOW = 0.7
"""A slot so many times slower than the fastest takes samples only when others don't suffice."""


def consolidate(view: Snapshot) -> list[Move]:
    """Moves from all but m* slots, when few enough samples are left and more slots hold them."""
    limit = view.settings.threshold * view.settings.samples
    if view.waiting or not 0 < view.unfinished <= limit:
        return []
    count = destinations(view, limit)
    if loaded(view) <= count:
        return []
    places = [place for place in view.slots if place.load and place.alive]
    slow = SLOW * max(place.speed for place in places)
    places.sort(key=lambda place: (place.speed < slow, -place.load, place.index))
    order = [place.index for place in places]
    return moves(view, spread(view, order[:count], order[count:]))


def spread(view: Snapshot, targets: Sequence[int], sources: Sequence[int]) -> Iterator[tuple[SampleRecord, Slot, int]]:
    """Every sample of `sources` to the target with the fewest, as far as there is room: (sample, from, to)."""
    room = [(view.slots[target].load, target) for target in targets]
    heapq.heapify(room)
    for place in map(view.slots.__getitem__, sources):
        for sample in place.samples.values():
            load, target = room[0]
            if sample.state is not SampleState.LEAVING and load < view.costs.max_sequences:
                yield sample, place, target
                heapq.heapreplace(room, (load + 1, target))


def loaded(view: Snapshot) -> int:
    """Slots that still hold samples."""
    return len(view.slots) - len(view.free) - len(view.resting) - view.busy


def destinations(view: Snapshot, samples: float) -> int:
    """m*: how many slots can hold so many samples at (nearly) flat latency and in their KV caches."""
    costs = view.costs
    batch = costs.batch_within(view.settings.stretch * costs.step_base_s)
    each = view.context / max(1, view.in_flight)
    return max(1, ceil(samples / batch), ceil(samples * each / costs.kv_tokens))


def moves(view: Snapshot, chosen: Iterable[tuple[SampleRecord, Slot, int]]) -> list[Move]:
    """(sample, from, to) as decisions, each sample carried in the way that is faster for it."""
    together = defaultdict(list)
    for sample, place, target in chosen:
        held = sample.group.prompt_tokens + place.tokens(sample, view.now, view.costs)
        together[place.index, target, view.costs.carry(held)[0]].append(sample.id)
    return [Move(tuple(names), source, target, carry) for (source, target, carry), names in together.items()]
