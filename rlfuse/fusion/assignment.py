"""Assign work to slots: admission to engines, passes and gradients to idle slots. Building blocks of every policy.

The samples of a prompt go to one engine. Admission pauses while the backlog of a kind of scoring exceeds its credit.
Only idle slots get work, in proportion to their speed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from math import ceil

from rlfuse.fusion.decisions import (
    PASS_BEFORE_STEP,
    Accumulate,
    Decision,
    Generate,
    Move,
    OptimizerStep,
    Score,
    Settings,
    Slot,
    Snapshot,
    Switch,
    Train,
)
from rlfuse.fusion.disaggregation import move_prefilled_groups, prefill_and_decode_engines
from rlfuse.fusion.states import SampleRecord, SampleState
from rlfuse.samples import prompt_id

REWARD = "reward"
MAX_WAIT_CALLS = 10  # wait of a small batch for more samples, in fixed costs of a call

NEXT_BUSY_SLOT = -1  # placeholder for the busy slot that becomes idle next

FIT_CANDIDATES = 16  # next pieces considered for the best fit

REWARD_EVERY_S, REWARD_EVERY_BUSY_S = 0.03, 0.1
"""Seconds over which rewards are batched during generation. The latter applies while all slots generate, since
rewards would compete for CPU cores."""


def admission_paused(view: Snapshot) -> bool:
    """Return whether admission pauses because a backlog of scoring exceeds its credit."""
    settings = view.settings
    return any(
        len(unscored) >= settings.credit_samples or view.backlog[kind] >= settings.credit_tokens
        for kind, unscored in view.unscored.items()
    )


class Capacity:
    """Remaining capacity of a slot while decisions are being made."""

    def __init__(self, view: Snapshot, slot: int):
        place = view.slots[slot]
        self.view, self.slot, self.rate = view, slot, place.rate
        self.load, self.reserved = place.load, place.reserved
        self.groups: list[int] = []
        self._order()

    def _order(self) -> None:
        self.order = (self.rate * self.view.costs.decode_step(self.load, 0.0), self.load, self.slot)

    def __lt__(self, other: Capacity) -> bool:
        return self.order < other.order

    def fits(self, group: int) -> bool:
        """Return whether the group fits. An empty engine takes any group, a slow one only what ends by the deadline."""
        if self.rate > 1 and self.view.in_flight and not self.in_time(group):
            return False
        costs, count = self.view.costs, self.view.waiting[group]
        more = count * sum(self.view.expected(group))
        return not self.load or (self.load + count <= costs.max_sequences and self.reserved + more <= costs.kv_tokens)

    def in_time(self, group: int) -> bool:
        """Return whether the group would end by the deadline."""
        view, load = self.view, self.load + self.view.waiting[group]
        return view.now + self.rate * view.costs.decode_step(load, 0.0) * view.expected(group)[1] <= view.deadline

    def take(self, group: int) -> None:
        count = self.view.waiting[group]
        self.groups.append(group)
        self.load += count
        self.reserved += count * sum(self.view.expected(group))
        self._order()


def admit(view: Snapshot, capacities: list[Capacity] | None = None) -> list[Decision]:
    """Admit waiting groups in order while they fit, each to the slot with the shortest steps, then the fewest samples.

    `capacities`: of all engines with room, some of which may have taken groups already.
    """
    if not view.waiting or admission_paused(view):
        return []
    readers, decoders = prefill_and_decode_engines(view)
    if readers:
        return move_prefilled_groups(view, readers, decoders)
    if capacities is None:
        capacities = [Capacity(view, slot) for slot in view.engines_with_room]
    heapq.heapify(capacities)
    taken = {capacity.slot: capacity for capacity in capacities if capacity.groups}
    gone = {group for capacity in taken.values() for group in capacity.groups}
    for group in view.waiting:
        if group in gone:
            continue
        while capacities and not capacities[0].fits(group):
            heapq.heappop(capacities)
        if not capacities:
            break
        capacities[0].take(group)
        taken[capacities[0].slot] = capacities[0]
        heapq.heapreplace(capacities, capacities[0])
    admitted = [Generate(slot, tuple(capacity.groups)) for slot, capacity in taken.items()]
    return admitted + switch_idle_slots_to_rollout(view, capacities)


def switch_idle_slots_to_rollout(view: Snapshot, capacities: list[Capacity]) -> list[Decision]:
    """Switch idle trainers back to generation if more samples wait than the engines can take."""
    if capacities:
        return []
    return [Switch(slot, "rollout") for slot in view.idle_trainers if view.slots[slot].alive]


def score_rewards(view: Snapshot) -> list[Decision]:
    """Score the rewards of finished samples; with a credit, in one call at a time, as it counts waiting samples."""
    names, none = view.unscored.get(REWARD), Settings()
    credit = (view.settings.credit_samples, view.settings.credit_tokens) != (none.credit_samples, none.credit_tokens)
    if not names or (credit and REWARD in view.scoring) or not batch_is_ready(view, REWARD):
        return []
    return [Score(REWARD, tuple(names))]


def switch_idle_slots_to_trainer(view: Snapshot) -> list[Decision]:
    """Switch idle engines to trainers if no samples wait, or if admission pauses for a backlog of passes."""
    kinds = [kind for kind in view.unscored if kind != REWARD]
    behind = admission_paused(view) and any(view.backlog[kind] for kind in kinds)
    if (view.waiting and not behind) or not (kinds or view.ready):
        return []
    return [Switch(slot, "trainer") for slot in view.idle_engines]


def unassigned(view: Snapshot, decisions: Iterable[Decision], samples: int) -> list[int]:
    """Return up to `samples` idle trainers that none of the decisions uses."""
    taken = {decision.slot for decision in decisions if not isinstance(decision, Move | Train | OptimizerStep)}
    if None in taken:  # a call of all ranks
        return []
    return list(islice((slot for slot in view.idle_trainers if slot not in taken), samples))


def score_passes(view: Snapshot, decisions: Collection[Decision] = ()) -> list[Decision]:
    """Score the pass with the largest backlog, distributed over the slots that the decisions leave idle."""
    kinds = [kind for kind in view.unscored if kind != REWARD and view.unscored[kind] and batch_is_ready(view, kind)]
    if not kinds or not view.idle_trainers:
        return []
    kind = max(kinds, key=view.backlog.__getitem__)
    names, tokens = view.unscored[kind], view.backlog[kind]
    also = models_in_same_call(view, view.unscored, kind)
    if view.settings.lockstep:
        return [Score(kind, tuple(names), None, also)] if view.all_ranks_idle and not decisions else []
    slots = unassigned(view, decisions, len(names))
    rate = view.costs.score_tokens_per_s / (1 + len(also))
    shares = divide_work(view, names, tokens, slots, view.costs.score_call_s * (1 + len(also)), rate)
    return [Score(kind, mine, slot, also) for slot, mine in shares.items()]


def models_in_same_call(view: Snapshot, waiting: Mapping[str, Mapping[str, int]], first: str) -> tuple[str, ...]:
    """Return more passes (or models) that wait for the same samples and can share the calls of `first`.

    Empty unless every slot is an idle trainer and gets a sample: else they are work for slots that become idle later.
    """
    names = waiting[first].keys()
    if not view.all_ranks_idle or len(names) < len(view.idle_trainers):
        return ()
    return tuple(key for key in waiting if key not in (first, REWARD) and names <= waiting[key].keys())


def batch_is_ready(view: Snapshot, kind: str) -> bool:
    """Return whether the backlog of a kind is large or old enough for a call, or complete."""
    costs, waited = view.costs, view.now - view.waiting_since[kind]
    if kind == REWARD:
        idle = view.idle_trainers or view.idle_engines
        return not view.in_flight or waited >= (REWARD_EVERY_S if idle else REWARD_EVERY_BUSY_S)
    enough = view.backlog[kind] >= costs.score_call_s * costs.score_tokens_per_s
    return enough or not view.in_flight or waited >= MAX_WAIT_CALLS * costs.score_call_s


def accumulate_gradients(view: Snapshot, decisions: Collection[Decision] = ()) -> list[Decision]:
    """Accumulate gradients of ready samples, distributed over the slots that the decisions leave idle."""
    models = [model for model, ready in view.ready.items() if ready]
    if not models or not view.idle_trainers:
        return []
    ready, whole = view.ready[models[0]], view.all_ranks_idle and not decisions
    also = models_in_same_call(view, view.ready, models[0])
    if view.settings.pipelined:
        return [Train({model: tuple(view.ready[model]) for model in models}, bubble_passes(view))] if whole else []
    if view.settings.lockstep_backward:
        return [Accumulate(models[0], tuple(ready), None, also)] if whole else []
    slots = unassigned(view, decisions, len(ready))
    rate = view.costs.train_tokens_per_s / (1 + len(also))
    shares = divide_work(view, ready, sum(ready.values()), slots, view.costs.train_call_s * (1 + len(also)), rate)
    return [Accumulate(models[0], mine, slot, also) for slot, mine in shares.items()]


def bubble_passes(view: Snapshot) -> dict[str, tuple[str, ...]]:
    """Return passes that fill the bubbles of a schedule.

    These are the passes of the next mini-batch, and all passes that must run before the next optimizer step.
    """
    found = {}
    for kind, parts in view.deferred.items():
        chosen = sorted(parts) if kind in PASS_BEFORE_STEP.values() else sorted(parts)[:1]
        if names := tuple(name for part in chosen for name in parts[part]):
            found[kind] = names
    return found


def prefetch_passes(view: Snapshot, decisions: Collection[Decision] = ()) -> list[Decision]:
    """Score the passes of the next mini-batch while all ranks are idle, e.g. while training waits for rewards."""
    if decisions or not view.all_ranks_idle:
        return []
    kind = next((kind for kind, parts in view.deferred.items() if parts), None)
    return [] if kind is None else [Score(kind, tuple(view.deferred[kind][min(view.deferred[kind])]))]


def step_optimizer(view: Snapshot) -> list[Decision]:
    """Run all optimizer steps that are ready, once every slot is an idle trainer and no group can be admitted."""
    able = view.ready_to_step and view.all_ranks_idle and (not view.waiting or admission_paused(view))
    return [OptimizerStep(view.ready_to_step[0], tuple(view.ready_to_step[1:]))] if able else []


def divide_work(
    view: Snapshot, names: Mapping[str, int], tokens: int, slots: list[int], call_s: float, tokens_per_s: float
) -> dict[int, tuple[str, ...]]:
    """Distribute the first of these samples over `slots` in shares of nearly equal time, longest first (Graham 1969).

    Other slots become idle later. During generation each slot gets a share as if all slots took one (guided
    self-scheduling, Polychronopoulos and Kuck 1987); afterwards, a share with which all slots end at the same time.
    """
    least, rates = int(call_s * tokens_per_s), [view.slots[slot].rate for slot in slots]
    part = tokens / view.effective_slots
    if not view.unfinished:
        part = tokens_per_s * seconds_until_done(view, tokens / tokens_per_s, rates)
    pieces = ((sum(map(names.__getitem__, members)), members) for members in sibling_groups(view, names, len(slots)))
    taken = _take_pieces(pieces, sum(max(part / rate, least) for rate in rates))
    return _assign_pieces(view, sorted(taken, reverse=True), slots, tokens_per_s)


def sibling_groups(view: Snapshot, names: Iterable[str], slots: int) -> Iterator[tuple[str, ...]]:
    """Yield sets of samples that go to one slot: all of a prompt if the prompt, computed once, dominates their tokens.

    The sets are split if no more samples will come and some slots would get none.
    """
    whole = (tuple(family) for _, family in groupby(names, prompt_id if view.prompts_dominate else None))
    first = list(islice(whole, slots))
    parts = 1 if view.unfinished or not first else slots // len(first)
    cut = (family[part::parts] for family in first for part in range(min(parts, len(family))))
    return chain(cut, whole)


def _take_pieces(pieces: Iterator[tuple[int, tuple[str, ...]]], rest: float) -> list[tuple[int, tuple[str, ...]]]:
    """Return the first pieces (at least one) of about `rest` tokens; the last is the best fit among the next few."""
    taken = list(islice(pieces, 1))
    rest -= sum(size for size, _ in taken)
    for piece in pieces:
        if piece[0] > rest:
            best = min((piece, *islice(pieces, FIT_CANDIDATES)), key=lambda each: abs(each[0] - rest))
            return taken + [best] * (rest >= best[0] / 2)
        taken.append(piece)
        rest -= piece[0]
    return taken


def seconds_until_done(view: Snapshot, work_s: float, rates: Collection[float]) -> float:
    """Return the seconds until `work_s` is done by slots of these rates, joined by others as they become idle."""
    ends = [max(0.0, end - view.now) for end in view.ends()]
    ends += [view.costs.switch_s] * (sum(not slot.drained for slot in view.slots) - len(rates) - len(ends))
    effective_slots = sum(1 / rate for rate in rates)
    for end in sorted(ends):
        if work_s <= end * effective_slots:
            break
        work_s, effective_slots = work_s + end, effective_slots + 1
    return work_s / effective_slots


def _assign_pieces(
    view: Snapshot, pieces: list[tuple[int, tuple[str, ...]]], slots: list[int], tokens_per_s: float
) -> dict[int, tuple[str, ...]]:
    """Assign each piece to the slot that would end first, or leave it to the next busy slot if that ends earlier."""
    shares: dict[int, list[str]] = {}
    heaps: dict[float, list[tuple[float, int]]] = {}
    for slot in slots:
        heaps.setdefault(view.slots[slot].rate, []).append((0, slot))
    if any(rate > 1 for rate in heaps) and (ends := view.ends()):
        heaps.setdefault(1.0, []).append((max(0.0, min(ends) - view.now) * tokens_per_s, NEXT_BUSY_SLOT))
    for heap in heaps.values():
        heapq.heapify(heap)
    for size, members in pieces if heaps else ():
        rate = min(heaps, key=lambda rate: (heaps[rate][0][0] + size) * rate)
        load, slot = heaps[rate][0]
        if slot != NEXT_BUSY_SLOT:
            shares.setdefault(slot, []).extend(members)
        heapq.heapreplace(heaps[rate], (load + size, slot))
    return {slot: tuple(each) for slot, each in shares.items()}


def consolidate(view: Snapshot) -> list[Move]:
    """Move the tail to m* slots, once it is short enough and more slots hold it (RLHFuse, arXiv 2409.13221)."""
    limit = view.settings.threshold * view.settings.samples
    if view.waiting or not 0 < view.unfinished <= limit:
        return []
    count = slots_needed(view, limit)
    if len(view.generating) <= count:
        return []
    order = [slot for slot in view.slots if slot.load and slot.alive and not slot.drained]
    order.sort(key=lambda slot: (slot.rate, -slot.load, slot.index))
    return as_moves(view, spread_by_load(view, order[:count], order[count:]))


def spread_by_load(
    view: Snapshot, targets: Sequence[Slot], sources: Sequence[Slot]
) -> Iterator[tuple[SampleRecord, Slot, int]]:
    """Yield moves of the samples of `sources` to the least loaded target with capacity, as (sample, source, target)."""
    room = [(target.load, target.index) for target in targets]
    heapq.heapify(room)
    for source in sources:
        for sample in source.samples.values():
            load, target = room[0]
            if sample.state is not SampleState.LEAVING and load < view.costs.max_sequences:
                yield sample, source, target
                heapq.heapreplace(room, (load + 1, target))


def slots_needed(view: Snapshot, samples: float) -> int:
    """Return m*, the number of slots that hold so many samples at nearly flat latency and within their KV caches."""
    costs = view.costs
    batch = costs.batch_within(view.settings.max_decode_slowdown * costs.step_base_s)
    each = view.context / max(1, view.in_flight)
    return max(1, ceil(samples / batch), ceil(samples * each / costs.kv_tokens))


def as_moves(view: Snapshot, chosen: Iterable[tuple[SampleRecord, Slot, int]]) -> list[Move]:
    """Turn (sample, source, target) into `Move` decisions, as KV cache or tokens, whichever is faster."""
    batches = defaultdict(list)
    for sample, source, target in chosen:
        held = sample.group.prompt_tokens + source.tokens(sample, view.now, view.costs)
        batches[source.index, target, view.costs.carry(held)[0]].append(sample.id)
    return [Move(tuple(names), source, target, carry) for (source, target, carry), names in batches.items()]
