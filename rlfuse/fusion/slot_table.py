"""The slots of one step: the samples of each engine, their progress, and the idle slots. O(1) per change.

A drained slot is offered only for a switch to `trainer`, since its rank takes part in calls that involve all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.costs.rates import Rates
from rlfuse.fusion.decisions import Accumulate, Score, Slot
from rlfuse.fusion.lengths import seconds_to_generate, with_sibling
from rlfuse.fusion.states import GroupRecord, SampleRecord, SampleState
from rlfuse.fusion.stopwatch import Stopwatch
from rlfuse.protocols import Load

REPLAN_PART = 16  # replan after 1/16 of the unfinished samples was admitted or finished


class SlotTable:
    """State of `count` slots, initially in role `rollout`. Measurements go to `rates`, which detect slow slots."""

    def __init__(self, count: int, costs: Costs, rates: Rates | None = None):
        self.rates = rates or Rates(count)
        self.rates.begin(costs)
        self.slots = [
            Slot(
                index, rate=rate, measured_rate=rate, steps_since_measured=self.rates.steps_since_measured.get(index, 0)
            )
            for index, rate in enumerate(self.rates.current)
        ]
        self.effective_slots = 0.0  # combined speed of the slots that are not drained, in typical slots
        self.generating, self.slow_engines = dict[int, None](), dict[int, None]()
        self._stopwatch = Stopwatch(count, costs, self.rates, self._changed)
        self._drained, self._shortest_first = set[int](), list[int]()
        self.costs, self._room = costs, costs.max_sequences
        self.groups: list[GroupRecord] = []
        self.waiting: OrderedDict[int, int] = OrderedDict()  # unlike dict, O(1) removal at the front
        self.deadline = self.context = 0.0
        self.in_flight = self.busy = 0
        self.idle_trainers, self._idle_ranks = dict[int, None](), dict[int, None]()
        self.idle_engines, self.engines_with_room = dict[int, None](), dict[int, None]()
        self._until_plan = self._finished = 0
        self.set_lengths_known(False, costs.max_sequences)
        self._sum_effective_slots()
        self._apply_drained()

    def queue(self, group: GroupRecord, samples: Iterable[SampleRecord]) -> None:
        group.waiting.update((sample.id, sample) for sample in samples)
        if group.waiting:
            self.waiting[group.number] = len(group.waiting)

    def admit(self, slot: int, groups: Iterable[int], now: float) -> None:
        for number in groups:
            del self.waiting[number]
            group = self.groups[number]
            for sample in group.waiting.values():
                sample.expected = group.expected
                self._enter(sample, slot, now)
                self._until_plan -= 1
            group.waiting.clear()

    def expected(self, group: int) -> tuple[int, float]:
        record = self.groups[group]
        return record.prompt_tokens, record.expected

    def waiting_samples(self, groups: Iterable[int]) -> list[str]:
        return [name for group in groups for name in self.groups[group].waiting]

    def _enter(self, sample: SampleRecord, index: int, now: float, with_cache: bool = False) -> None:
        sample.transition_to(SampleState.GENERATING)
        slot, prompt_tokens = self.slots[index], sample.group.prompt_tokens
        self._advance(slot, now)
        if not slot.samples:
            slot.stall = 0.0
            self._stopwatch.begin_stretch(slot, slot.steps)
        if not with_cache:
            shared = any(sibling.slot == index for sibling in sample.group.samples)
            slot.stall += (sample.carried + (0 if shared else prompt_tokens)) / self.costs.prefill_tokens_per_s
        sample.slot, sample.steps_before = index, slot.steps
        slot.samples[sample.id] = sample
        sample.reserved = prompt_tokens + max(sample.expected, sample.carried)
        slot.reserved += sample.reserved
        self._add_context(slot, prompt_tokens + sample.carried)
        self.in_flight += 1
        self._refresh(slot)

    def finish(self, sample: SampleRecord, tokens: int, now: float) -> None:
        """Remove a finished sample; update the pace of its slot and the expected lengths of its group."""
        self._exit(sample, tokens, now, whole=True)
        sample.transition_to(SampleState.FINISHED)
        self._until_plan -= 1
        self._finished += 1
        self._release_target(sample)  # it finished before it could move
        group = sample.group
        group.generated += 1
        for sibling in group.samples:
            if sibling.slot is not None:
                sibling.expected = with_sibling(sibling.expected, group.generated, tokens)

    def take_finished(self) -> int:
        finished, self._finished = self._finished, 0
        return finished

    def _exit(self, sample: SampleRecord, tokens: int, now: float, whole: bool = False) -> None:
        if sample.slot is None:
            raise RuntimeError(f"sample {sample.id} is on no engine: it is {sample.state}")
        slot, sample.slot = self.slots[sample.slot], None
        self._advance(slot, now)
        steps = sample.steps_before + tokens - sample.carried
        if not (whole and not sample.moved and self._stopwatch.measure(slot, steps)):
            steps = max(slot.steps, steps)
        self._add_context(slot, (steps - slot.steps) * len(slot.samples) - sample.group.prompt_tokens - tokens)
        slot.steps = steps
        del slot.samples[sample.id]
        slot.reserved -= sample.reserved
        if not slot.samples or slot.context < 0:
            self._add_context(slot, -slot.context)
        self.in_flight -= 1
        self._refresh(slot)

    def _advance(self, slot: Slot, now: float) -> None:
        if slot.samples and now > slot.updated_at:
            steps = self._stopwatch.advance(slot, now)
            slot.steps += steps
            self._add_context(slot, steps * len(slot.samples))
        slot.updated_at = now

    def _add_context(self, slot: Slot, tokens: float) -> None:
        slot.context += tokens
        self.context += tokens

    def drop(self, groups: Iterable[GroupRecord]) -> list[tuple[int, list[str]]]:
        """Drop groups that are no longer needed. Return their samples on engines, as (slot, sample ids)."""
        for group in groups:
            self.waiting.pop(group.number, None)
            for sample in group.waiting.values():
                sample.transition_to(SampleState.UNNEEDED)
            group.waiting.clear()
        held = {slot.index: [name for name, s in slot.samples.items() if s.group.unneeded] for slot in self.slots}
        return [(slot, names) for slot, names in held.items() if names]

    def start_move(self, names: Iterable[str], source: int, target: int) -> None:
        for name in names:
            sample = self.slots[source].samples[name]
            sample.transition_to(SampleState.LEAVING)
            sample.target = target
            self.slots[target].arriving += 1
            self.in_flight += 1
        self._refresh(self.slots[target])

    def evict(self, sample: SampleRecord, tokens: int, now: float) -> int | None:
        """Remove an evicted sample. Return the slot that it moves to, or None if it waits."""
        self._exit(sample, tokens, now)
        sample.carried = tokens
        target = None if sample.target is None else self.slots[sample.target]
        if target is not None and target.alive and not target.drained and not sample.group.unneeded:
            sample.transition_to(SampleState.MOVING)
            return target.index
        self._wait(sample)
        return None

    def arrive(self, sample: SampleRecord, slot: int, now: float, with_cache: bool = False) -> None:
        self._release_target(sample)
        sample.moved = True
        self._enter(sample, slot, now, with_cache)

    def _release_target(self, sample: SampleRecord) -> None:
        if sample.target is not None:
            slot, sample.target = self.slots[sample.target], None
            slot.arriving -= 1
            self.in_flight -= 1
            self._refresh(slot)

    def _wait(self, sample: SampleRecord) -> None:
        self._release_target(sample)
        if sample.group.unneeded:
            sample.transition_to(SampleState.UNNEEDED)
        else:
            sample.transition_to(SampleState.WAITING)
            self.queue(sample.group, (sample,))

    def lose_engine(self, slot: int, now: float) -> None:
        lost = self.slots[slot]
        lost.alive = False
        for sample in list(lost.samples.values()):
            self._exit(sample, sample.carried, now)
            sample.carried = 0
            self._wait(sample)
        self._refresh(lost)

    def _apply_drained(self) -> None:
        """Apply drained and restored slots. Drained slots continue if no other engine is alive."""
        drained = self.rates.drained
        if not any(slot.alive and slot.index not in drained for slot in self.slots):
            drained = set()
        if drained != self._drained:
            changed, self._drained = drained ^ self._drained, set(drained)
            for slot in map(self.slots.__getitem__, changed):
                slot.drained = slot.index in drained
                self._refresh(slot)
            self._sum_effective_slots()
            self.replan()

    def start_leaving_drained(self, now: float) -> list[tuple[int, list[str], str]]:
        """Return the samples to evict from drained slots, as (slot, sample ids, `kv` or `tokens`).

        Samples that would finish before they could move stay. KV caches are moved only if another engine has room.
        """
        self._apply_drained()
        drained = (self.slots[index] for index in sorted(self._drained))
        return [left for slot in drained if slot.samples for left in self._leaving(slot, now)]

    def _leaving(self, slot: Slot, now: float) -> list[tuple[int, list[str], str]]:
        chosen: dict[str, list[str]] = {}
        for sample in slot.samples.values():
            carry, seconds = self.costs.carry(sample.group.prompt_tokens + slot.tokens(sample, now, self.costs))
            ends = slot.remaining(sample, now, self.costs) * slot.pace(self.costs) <= seconds
            if sample.state is SampleState.GENERATING and not ends:
                sample.transition_to(SampleState.LEAVING)
                chosen.setdefault(carry if self.engines_with_room else "tokens", []).append(sample.id)
        return [(slot.index, names, carry) for carry, names in chosen.items()]

    @property
    def slot_to_restart(self) -> int | None:
        """Return an idle slot whose engine must be restarted, if samples wait and no engine is alive; else None."""
        if not self.waiting or any(slot.alive for slot in self.slots):
            return None
        return next((slot.index for slot in self.slots if slot.idle), None)

    def restore_engine(self, slot: int) -> None:
        self.slots[slot].role, self.slots[slot].alive = "rollout", True
        self.release(slot)
        self.replan()

    def occupy(self, *slots: int) -> None:
        for slot in slots:
            if not self.slots[slot].idle:
                raise RuntimeError(f"slot {slot} got work while it is busy: {self.slots[slot]}")
            self.slots[slot].busy = True
            self.busy += 1
            self._refresh(self.slots[slot])

    def release(self, *slots: int, now: float = 0.0) -> None:
        for slot in slots:
            self._stopwatch.end_call(self.slots[slot], now)
            self.slots[slot].busy = False
            self.busy -= 1
            self._refresh(self.slots[slot])

    def begin_call(self, call: Score | Accumulate, tokens: Sequence[int], now: float) -> None:
        if call.slot is not None:
            self._stopwatch.begin_call(self.slots[call.slot], call, tokens, now)

    def silent_engines(self, now: float) -> list[int]:
        return self._stopwatch.silent_engines(self.slots, now)

    def record_load(self, slot: int, load: Load, now: float) -> None:
        place = self.slots[slot]
        if place.samples and load.running:
            self._advance(place, now)
            self._stopwatch.record_load(place, load.steps)

    def _changed(self, slot: Slot) -> None:
        self._sum_effective_slots()
        self._refresh(slot)

    def _sum_effective_slots(self) -> None:
        self.effective_slots = sum(1 / slot.rate for slot in self.slots if not slot.drained)

    def ends(self) -> list[float]:
        """Return the predicted end times of the running calls."""
        return self._stopwatch.ends()

    @property
    def all_ranks_idle(self) -> bool:
        return len(self._idle_ranks) == len(self.slots)

    def _refresh(self, slot: Slot) -> None:
        costs = self.costs
        room = slot.load < costs.max_sequences and (slot.reserved < costs.kv_tokens or not slot.load)
        generates = slot.role == "rollout" and slot.alive and not slot.busy and not slot.drained
        _set_member(self._idle_ranks, slot.index, slot.idle and slot.role == "trainer")
        _set_member(self.idle_trainers, slot.index, slot.index in self._idle_ranks and not slot.drained)
        _set_member(self.idle_engines, slot.index, slot.idle and slot.role == "rollout")
        _set_member(self.engines_with_room, slot.index, room and generates)
        _set_member(self.generating, slot.index, slot.load > 0 and not slot.drained)
        _set_member(self.slow_engines, slot.index, bool(slot.samples) and slot.rate > 1 and not slot.drained)

    def replan(self) -> None:
        self._until_plan = 0

    def set_lengths_known(self, known: bool, most: int) -> None:
        """Set whether lengths are known: then the longest groups start first, with at most `most` samples per slot."""
        self.lengths_known = known
        self.costs = replace(self.costs, max_sequences=min(self._room, most) if known else self._room)
        for slot in self.slots:
            self._refresh(slot)
        self.replan()

    def plan(self, now: float, other_s: float) -> None:
        """Apply drained or restored slots; if due, recompute the deadline and the order of waiting groups.

        `other_s`: seconds of other work that the slots do during generation.
        """
        self._apply_drained()
        if self._until_plan > 0:
            return
        waiting = [(self.groups[group].expected, count) for group, count in self.waiting.items()]
        remaining = [tokens for slot in self.slots for tokens in slot.all_remaining(now, self.costs)]
        remaining += [max(1.0, expected) for expected, count in waiting for _ in range(count)]
        effective_slots = sum(1 / slot.rate for slot in self.slots if slot.alive and not slot.drained)
        self.deadline = now + seconds_to_generate(np.array(remaining), effective_slots or 1.0, other_s, self.costs)
        if self.lengths_known:
            records = sorted(map(self.groups.__getitem__, self.waiting), key=lambda g: (not g.next_step, g.expected))
            self._shortest_first = [group.number for group in records]
        else:
            self._shortest_first = []
        self._until_plan = max(1, len(remaining) // REPLAN_PART)

    @property
    def shortest_first(self) -> Sequence[int]:
        """Return waiting groups (and some admitted ones), shortest first; empty if lengths are unknown."""
        order = self._shortest_first
        while order and order[-1] not in self.waiting:
            order.pop()
        return order


def _set_member(members: dict[int, None], index: int, belongs: bool) -> None:
    if belongs:
        members[index] = None
    else:
        members.pop(index, None)
