"""The slots of one step: who holds which sample, how far it is, and who is free.

Role: the part of the board that follows generation and roles. Every change costs O(1) (the plan of `deadline`, a pass
over all unfinished samples, is renewed each time a sixteenth of them has been admitted or finished).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from rlfuse.fusion.costs import Costs
from rlfuse.fusion.decisions import InFlight, Slot
from rlfuse.fusion.lengths import seconds_to_generate, with_sibling

PLANS = 16
TELLING = 16
"""Decoding steps after which a sample tells how fast its engine is."""


class SlotTable:
    """`count` slots, all in role `rollout`."""

    def __init__(self, count: int, costs: Costs):
        self.slots = [Slot(index) for index in range(count)]
        self.costs = costs
        self.waiting: OrderedDict[int, int] = OrderedDict()  # unlike dict, quick to take from the front
        self.known = False
        """Whether lengths are known from before: then the longest are admitted first."""
        self.deadline = 0.0
        self.flying = self.busy = 0
        self.context = 0.0
        self._free: dict[int, None] = {}
        self._resting, self._open = dict.fromkeys(range(count)), dict.fromkeys(range(count))
        self._rest: dict[int, dict[str, int]] = {}
        self._ahead: set[int] = set()
        self._forgotten: set[int] = set()
        self._expected: dict[int, tuple[int, float]] = {}
        self._finished: dict[int, int] = {}
        self._siblings: dict[int, dict[str, InFlight]] = defaultdict(dict)
        self._slot_of: dict[str, int] = {}
        self._target: dict[str, int] = {}
        self._moving: dict[str, InFlight] = {}
        self._shortest_first: list[int] = []
        self._until_plan = 0

    # Samples ---------------------------------------------------------------------------------------------------------

    def queue(
        self, group: int, samples: Mapping[str, int], prompt_tokens: int, expected: float, ahead: bool = False
    ) -> None:
        """These samples of a group (and the response tokens they have) wait for a slot.

        `ahead`: of a later step, to be admitted when nothing of this one waits.
        """
        self._expected[group] = prompt_tokens, expected
        if ahead:
            self._ahead.add(group)
        if samples:
            self._rest.setdefault(group, {}).update(samples)
            self.waiting[group] = len(self._rest[group])

    def admit(self, slot: int, groups: Iterable[int], now: float) -> None:
        """What waits of these groups goes to the slot."""
        for group in groups:
            del self.waiting[group]
            prompt_tokens, expected = self._expected[group]
            for name, tokens in self._rest.pop(group).items():
                self._board(slot, InFlight(name, group, prompt_tokens, tokens, 0.0, 0.0, expected), now)
                self._until_plan -= 1

    def expected(self, group: int) -> tuple[int, float]:
        """(prompt tokens, response tokens expected of each sample)."""
        return self._expected[group]

    def names(self, groups: Iterable[int]) -> list[str]:
        """Waiting samples of these groups."""
        return [name for group in groups for name in self._rest[group]]

    def _board(self, slot: int, flight: InFlight, now: float) -> None:
        place = self.slots[slot]
        self._advance(place, now)
        flight.since, flight.foreseen = place.steps, place.foreseen
        place.flights[flight.sample] = flight
        flight.reserved = flight.prompt_tokens + max(flight.expected, flight.carried)
        place.reserved += flight.reserved
        self._siblings[flight.group][flight.sample] = flight
        self._hold(place, flight.prompt_tokens + flight.carried)
        self._slot_of[flight.sample] = slot
        self.flying += 1
        self._refresh(place)

    def finish(self, name: str, group: int, tokens: int, now: float) -> None:
        """A sample is whole; corrects its slot's pace and its siblings' expectations."""
        place = self.slots[self._slot_of[name]]
        flight = place.flights[name]
        self._leave(flight, place, tokens, now)
        self._until_plan -= 1
        if (target := self._target.pop(name, None)) is not None:  # it was asked to move, too late
            self._arrived(target)
        self._finished[group] = count = self._finished.get(group, 0) + 1
        for sibling in self._siblings[group].values():
            sibling.expected = with_sibling(sibling.expected, count, tokens)

    def _leave(self, flight: InFlight, place: Slot, tokens: int, now: float) -> None:
        """With so many tokens, which tells how many steps the engine has really done since it came."""
        self._advance(place, now)
        done, foreseen = tokens - flight.carried, place.foreseen - flight.foreseen
        steps = max(place.steps, flight.since + done)
        if done and foreseen >= TELLING:
            place.speed = done / foreseen
        self._hold(place, (steps - place.steps) * len(place.flights) - flight.prompt_tokens - tokens)
        place.steps = steps
        del place.flights[flight.sample]
        del self._slot_of[flight.sample]
        place.reserved -= flight.reserved
        del self._siblings[flight.group][flight.sample]
        if not place.flights or place.context < 0:
            self._hold(place, -place.context)
        self.flying -= 1
        self._refresh(place)

    def _advance(self, place: Slot, now: float) -> None:
        if place.flights and now > place.seen:
            steps = (now - place.seen) / place.pace(self.costs)
            place.steps += steps
            place.foreseen += steps / place.speed
            self._hold(place, steps * len(place.flights))
        place.seen = now

    def _hold(self, place: Slot, tokens: float) -> None:
        place.context += tokens
        self.context += tokens

    def forget(self, groups: set[int]) -> list[tuple[int, list[str]]]:
        """These groups are not needed any more; returns (slot, samples) of those that are on engines."""
        self._forgotten = groups
        for group in groups & self.waiting.keys():
            del self.waiting[group], self._rest[group]
        flying: dict[int, list[str]] = {}
        for place in self.slots:
            for flight in place.flights.values():
                if flight.group in groups:
                    flying.setdefault(place.index, []).append(flight.sample)
        return list(flying.items())

    # Moves -----------------------------------------------------------------------------------------------------------

    def start_move(self, names: Iterable[str], source: int, target: int, now: float) -> None:
        """These samples were told to move."""
        for name in names:
            self.slots[source].flights[name].leaving = True
            self._target[name] = target
            self.slots[target].arriving += 1
            self.flying += 1
        self._refresh(self.slots[target])

    def leave(self, name: str, group: int, tokens: int, now: float) -> int | None:
        """A sample left its engine; where to, None if nowhere: then it waits."""
        place = self.slots[self._slot_of[name]]
        flight = place.flights[name]
        self._leave(flight, place, tokens, now)
        target = self._target.get(name)
        if target is not None and self.slots[target].alive and group not in self._forgotten:
            self._moving[name] = InFlight(name, group, flight.prompt_tokens, tokens, 0.0, 0.0, flight.expected)
            return target
        if target is not None:
            self._arrived(self._target.pop(name))
        if group not in self._forgotten:
            self.queue(group, {name: tokens}, *self._expected[group])
        return None

    def arrive(self, name: str, slot: int, now: float) -> None:
        """It goes on here."""
        self._arrived(self._target.pop(name))
        self._board(slot, self._moving.pop(name), now)

    def _arrived(self, target: int) -> None:
        self.slots[target].arriving -= 1
        self.flying -= 1
        self._refresh(self.slots[target])

    def lose(self, slot: int, now: float) -> None:
        """Its engine is gone; its samples wait again."""
        place = self.slots[slot]
        place.alive = False
        for flight in list(place.flights.values()):
            self._leave(flight, place, flight.carried, now)
            if (target := self._target.pop(flight.sample, None)) is not None:
                self._arrived(target)
            group = flight.group
            if group not in self._forgotten:
                self.queue(group, {flight.sample: 0}, *self._expected[group])
        self._refresh(place)

    @property
    def stranded(self) -> int | None:
        """A slot that has to get another engine now: samples wait, and there is none left to generate them."""
        if not self.waiting or any(place.alive for place in self.slots):
            return None
        return next((place.index for place in self.slots if place.idle), None)

    def revive(self, slot: int) -> None:
        """It has got one; it was occupied meanwhile."""
        self.slots[slot].role, self.slots[slot].alive = "rollout", True
        self.release(slot)
        self.replan()

    # Roles and room --------------------------------------------------------------------------------------------------

    def occupy(self, *slots: int) -> None:
        """They score, train or change roles."""
        for slot in slots:
            if not self.slots[slot].idle:
                raise RuntimeError(f"slot {slot} was given work while it has some: {self.slots[slot]}")
            self.slots[slot].busy = True
            self.busy += 1
            self._refresh(self.slots[slot])

    def release(self, *slots: int) -> None:
        """They are done with that."""
        for slot in slots:
            self.slots[slot].busy = False
            self.busy -= 1
            self._refresh(self.slots[slot])

    @property
    def free(self) -> Collection[int]:
        """Slots in role `trainer` that do nothing."""
        return self._free.keys()

    @property
    def resting(self) -> Collection[int]:
        """Slots in role `rollout` that hold nothing."""
        return self._resting.keys()

    @property
    def open(self) -> Collection[int]:
        """Slots in role `rollout` that have room."""
        return self._open.keys()

    def _refresh(self, place: Slot) -> None:
        costs = self.costs
        room = place.load < costs.max_sequences and (place.reserved < costs.kv_tokens or not place.load)
        _set(self._free, place.index, place.idle and place.role == "trainer")
        _set(self._resting, place.index, place.idle and place.role == "rollout")
        _set(self._open, place.index, room and place.role == "rollout" and place.alive and not place.busy)

    # Plans -----------------------------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Groups were added: the plan is out of date."""
        self._until_plan = 0

    def plan(self, now: float, other_s: float) -> None:
        """Work out anew, if that is due, when generation can be over and which waiting groups are the longest.

        `other_s`: seconds of work beside generation that slots have to do meanwhile.
        """
        if self._until_plan > 0:
            return
        waiting = [(self._expected[group][1], count) for group, count in self.waiting.items()]
        remaining = [slot.remaining(f, now, self.costs) for slot in self.slots for f in slot.flights.values()]
        remaining += [max(1.0, expected) for expected, count in waiting for _ in range(count)]
        alive = max(1, sum(slot.alive for slot in self.slots))
        self.deadline = now + seconds_to_generate(np.array(remaining), alive, other_s, self.costs)
        by_length = sorted(self.waiting, key=lambda group: (group not in self._ahead, self._expected[group][1]))
        self._shortest_first = by_length if self.known else []
        self._until_plan = max(1, len(remaining) // PLANS)

    @property
    def shortest_first(self) -> Sequence[int]:
        """Waiting groups, the longest last, and some that wait no more; none where nothing is known of lengths."""
        order = self._shortest_first
        while order and order[-1] not in self.waiting:
            order.pop()
        return order


def _set(members: dict[int, None], index: int, belongs: bool) -> None:
    if belongs:
        members[index] = None
    else:
        members.pop(index, None)
