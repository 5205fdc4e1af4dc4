"""The adaptive policy: admission by expected length, cost-gated release of slots, training during generation.

Samples that a slow slot would finish too late move to other slots (Malleus, arXiv 2410.13333). `simulate.tuning`
chooses the settings; if none of them beats `serial`, the policy behaves as `serial`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

from rlfuse.fusion.assignment import (
    REWARD,
    Capacity,
    accumulate_gradients,
    admission_paused,
    admit,
    as_moves,
    consolidate,
    prefetch_passes,
    score_passes,
    score_rewards,
    slots_needed,
    step_optimizer,
    switch_idle_slots_to_rollout,
    switch_idle_slots_to_trainer,
)
from rlfuse.fusion.decisions import TUNABLE, Decision, Generate, Move, Slot, Snapshot, fusion_policy
from rlfuse.fusion.serial import serial, train
from rlfuse.fusion.states import SampleRecord, SampleState

RELEASE_CHECKS = 32  # moves are considered after each 1/32 of the unfinished samples
HYSTERESIS = 1.25  # samples move if this many times more slots hold them than needed
PROBE_AFTER_STEPS = 8  # steps without a measurement after which a slow slot gets a group regardless
LENGTH_MARGIN = 1.3  # safety factor on expected lengths at admission


@fusion_policy(tuned=TUNABLE, trains_early=True)
def adaptive(view: Snapshot) -> list[Decision]:
    """Admit, release slots, score and train, whichever is worth it now."""
    if not view.settings.overlapping and all(slot.alive for slot in view.slots):
        return serial(view)
    admitted = admit_by_deadline(view)
    work = score_passes(view, admitted)
    if view.settings.early_training:
        work = work + accumulate_gradients(view, admitted + work) or step_optimizer(view)
    work = work or train(view) or prefetch_passes(view, admitted)
    moved = offload_slow_slots(view) or free_slots(view)
    return admitted + moved + score_rewards(view) + switch_idle_slots_to_trainer(view) + work


def admit_by_deadline(view: Snapshot) -> list[Decision]:
    """Admit the longest groups first, to batches that end by the deadline; evenly if all waiting groups fit."""
    if not view.waiting or admission_paused(view):
        return []
    if view.settings.prefill_share:
        return admit(view)
    capacities = sorted((Capacity(view, slot) for slot in view.engines_with_room), key=lambda capacity: capacity.rate)
    more = len(capacities) * view.costs.max_sequences - sum(capacity.load for capacity in capacities)
    tried = probe_slow_slots(view, capacities)
    if not (view.shortest_first and view.settings.longest_first) or len(view.waiting) <= more > 0 == view.in_flight:
        return admit(view, capacities)
    groups = (group for group in reversed(view.shortest_first) if group in view.waiting and group not in tried)
    group, decisions = next(groups, None), []
    for capacity in capacities:
        slot = view.slots[capacity.slot]
        first = next(iter(slot.samples.values()), None)  # usually the longest on the slot, and cheap to find
        longest = slot.remaining(first, view.now, view.costs) if first else 0.0
        if group is not None and joins_in_time(view, capacity, group, longest):
            longest = longest_on(view, slot)
        while group is not None and capacity.fits(group) and joins_in_time(view, capacity, group, longest):
            longest = max(longest, view.expected(group)[1])
            capacity.take(group)
            group = next(groups, None)
        if capacity.groups:
            decisions.append(Generate(capacity.slot, tuple(capacity.groups)))
    return decisions + switch_idle_slots_to_rollout(view, capacities)


def probe_slow_slots(view: Snapshot, capacities: Iterable[Capacity]) -> set[int]:
    """Give each idle slow slot a group to measure it; every PROBE_AFTER_STEPS steps even if it ends late."""
    slow = [capacity for capacity in capacities if not capacity.load and view.slots[capacity.slot].steps_since_measured]
    if not slow:
        return set()
    groups = (group for group in view.shortest_first or view.waiting if group in view.waiting)
    tried = set()
    for capacity, group in zip(slow, islice(groups, len(view.waiting) - 1), strict=False):
        if capacity.in_time(group) or view.slots[capacity.slot].steps_since_measured >= PROBE_AFTER_STEPS:
            capacity.take(group)
            tried.add(group)
    return tried


def longest_on(view: Snapshot, slot: Slot) -> float:
    """Return the largest number of remaining tokens of the samples on the slot."""
    return max(slot.all_remaining(view.now, view.costs), default=0.0)


def joins_in_time(view: Snapshot, capacity: Capacity, group: int, remaining: float) -> bool:
    """Return whether the group can join samples with at most `remaining` tokens and all end by the deadline."""
    count, longest = view.waiting[group], LENGTH_MARGIN * max(remaining, view.expected(group)[1])
    return not capacity.load or capacity.load + count <= batch_in_time(view, longest, capacity)


def batch_in_time(view: Snapshot, remaining: float, capacity: Capacity) -> int:
    """Return the largest batch in which `remaining` tokens end by the deadline; at least the flat batch."""
    step = max(0.0, view.deadline - view.now) / min(max(1.0, remaining), view.costs.max_tokens) / capacity.rate
    within = view.costs.batch_within(step - view.costs.step_per_context_token_s * capacity.reserved)
    return max(within, view.costs.flat_batch)


def release_check_is_due(view: Snapshot) -> bool:
    """Return whether 1/RELEASE_CHECKS of the unfinished samples finished since the last check."""
    rhythm = max(1, view.unfinished // RELEASE_CHECKS)
    return -view.unfinished % rhythm < max(1, view.finished)


def free_slots(view: Snapshot) -> list[Move]:
    """Move samples off slots if others can hold them at flat latency and the freed slots have enough work."""
    if not view.settings.cost_gated:
        return consolidate(view)
    limit = view.settings.threshold * view.settings.samples
    if view.waiting or not 0 < view.unfinished <= limit or not release_check_is_due(view):
        return []
    count = slots_needed(view, view.unfinished)
    if len(view.generating) <= HYSTERESIS * count or not freeing_is_worth_it(view):
        return []
    generating = (slot for slot in view.slots if slot.samples and slot.alive and not slot.drained)
    longest = {slot.index: longest_on(view, slot) for slot in generating}
    typical = longest.keys() - view.slow_engines or longest.keys()
    horizon = view.settings.max_decode_slowdown * max(
        longest[index] * view.slots[index].pace(view.costs) for index in typical
    )
    order = sorted(
        longest, key=lambda index: (index in typical, longest[index])
    )  # the slots with the longest samples keep them
    targets = [MoveTarget(view, view.slots[index], horizon) for index in order[-count:]]
    return as_moves(view, spread_by_deadline((view.slots[index] for index in order[:-count]), targets))


def offload_slow_slots(view: Snapshot) -> list[Move]:
    """Move samples off slow slots if they would end earlier elsewhere, latest first."""
    if view.waiting or not view.slow_engines or not release_check_is_due(view):
        return []
    able = (view.slots[slot] for slot in view.engines_with_room if slot not in view.slow_engines)
    targets = [MoveTarget(view, slot) for slot in able if slot.load]  # idle engines switch to scoring instead
    heapq.heapify(targets)
    slow = [view.slots[slot] for slot in view.slow_engines if not view.slots[slot].steps_since_measured]
    held = [
        (slot.remaining(sample, view.now, view.costs) * slot.pace(view.costs), sample, slot)
        for slot in slow
        for sample in slot.samples.values()
    ]
    moved = []
    for seconds, sample, source in sorted(held, key=lambda each: -each[0]):
        if not targets:
            break
        targets[0].horizon = seconds / HYSTERESIS
        if targets[0].takes(sample, source):
            moved.append((sample, source, targets[0].slot.index))
            heapq.heapreplace(targets, targets[0])
    return as_moves(view, moved)


class MoveTarget:
    """A slot that samples can move to. It takes no sample that would end after `horizon` seconds."""

    def __init__(self, view: Snapshot, slot: Slot, horizon: float = 0.0):
        self.view, self.slot, self.horizon = view, slot, horizon
        self.load, self.arrival = slot.load, 0.0

    def __lt__(self, other: MoveTarget) -> bool:
        return (self.load, self.slot.index) < (other.load, other.slot.index)

    def takes(self, sample: SampleRecord, source: Slot) -> bool:
        """Reserve capacity for a sample and return True; return False if it would end too late or does not fit."""
        costs, now = self.view.costs, self.view.now
        arrival = self.arrival + costs.carry(sample.group.prompt_tokens + source.tokens(sample, now, costs))[1]
        pace = costs.decode_step(self.load + 1, self.slot.context) * self.slot.measured_rate
        late = arrival + source.remaining(sample, now, costs) * pace > self.horizon
        if late or sample.state is SampleState.LEAVING or self.load >= costs.max_sequences:
            return False
        self.load, self.arrival = self.load + 1, arrival - costs.move_s  # transfers to a slot are sequential
        return True


def spread_by_deadline(sources: Iterable[Slot], targets: list[MoveTarget]) -> list[tuple[SampleRecord, Slot, int]]:
    """Return moves of samples to the least loaded targets, up to the first source that cannot be emptied."""
    heapq.heapify(targets)
    moved: list[tuple[SampleRecord, Slot, int]] = []
    for source in sources:
        mine = []
        for sample in source.samples.values():
            if not targets[0].takes(sample, source):
                return moved
            mine.append((sample, source, targets[0].slot.index))
            heapq.heapreplace(targets, targets[0])
        moved += mine
    return moved


def freeing_is_worth_it(view: Snapshot) -> bool:
    """Return whether the waiting work takes longer than freeing a slot, and generation lasts longer than that."""
    costs = view.costs
    passes_now = sum(tokens for kind, tokens in view.backlog.items() if kind != REWARD)
    ready = sum(sum(samples.values()) for samples in view.ready.values())
    now = passes_now / costs.score_tokens_per_s + ready / costs.train_tokens_per_s
    price = costs.switch_s + costs.move_s
    return now > price and max(0.0, view.deadline - view.now) > price and not view.idle_trainers
