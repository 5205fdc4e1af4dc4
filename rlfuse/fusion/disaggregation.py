"""Disaggregate prefill and decoding (DistServe, arXiv 2401.09670): some engines only prefill, the others only decode.

Used by `assignment.admit` if `settings.prefill_share` is above 0. A group is prefilled on one engine and moved as a
whole; if no decoding engine has room, it stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rlfuse.fusion.decisions import Decision, Generate, Move, Slot, Snapshot
from rlfuse.fusion.states import SampleRecord, SampleState

MAX_PREFILL_S = 0.25  # seconds of prompts prefilled together, about the interval between decisions


def prefill_and_decode_engines(view: Snapshot) -> tuple[list[Slot], list[Slot]]:
    """Return the prefill engines (the fastest) and the decode engines; without KV transfer all engines decode."""
    engines = [s for s in view.slots if s.alive and not s.drained and not s.busy and s.role == "rollout"]
    if view.costs.link_bytes_per_s <= 0 or len(engines) < 2 or view.settings.prefill_share <= 0:
        return [], engines
    engines.sort(key=lambda slot: (slot.rate, slot.index))
    count = prefill_engine_count(view.settings.prefill_share, len(engines))
    return engines[:count], engines[count:]


def prefill_engine_count(share: float, engines: int) -> int:
    """Return the number of prefill engines for a share; both parts have at least one engine."""
    return max(1, min(engines - 1, round(share * engines)))


def move_prefilled_groups(view: Snapshot, readers: Iterable[Slot], decoders: Iterable[Slot]) -> list[Decision]:
    """Move prefilled groups to the decode engine with the shortest steps, and admit the next groups to prefill."""
    rooms, decisions, waiting = {slot.index: _Room(view, slot) for slot in decoders}, list[Decision](), _in_order(view)
    for slot in readers:
        groups = defaultdict[int, list[SampleRecord]](list)
        for sample in slot.samples.values():
            if sample.state is not SampleState.LEAVING:
                groups[sample.group.number].append(sample)
            elif sample.target in rooms:
                rooms[sample.target].reserved += sample.reserved  # capacity is reserved for it
        held = [sample for group in groups.values() for sample in group]
        if any(slot.tokens(sample, view.now, view.costs) < sample.carried + 1 for sample in held):
            continue  # a prompt is still being prefilled
        for group in groups.values():
            target = min((each for each in rooms.values() if each.fits(*_size(group))), default=None)
            if target is not None:
                target.take(*_size(group))
                decisions.append(Move(tuple(sample.id for sample in group), slot.index, target.slot.index, "kv"))
        if taken := tuple(_next(view, _Room(view, slot), waiting)):
            decisions.append(Generate(slot.index, taken))
    return decisions


def _in_order(view: Snapshot) -> list[int]:
    if view.shortest_first and view.settings.longest_first:
        return [group for group in view.shortest_first if group in view.waiting]
    return list(reversed(view.waiting))


def _next(view: Snapshot, room: _Room, waiting: list[int]) -> Iterator[int]:
    """Yield the groups to prefill together. An empty engine takes any group."""
    seconds = 0.0
    while waiting and seconds < MAX_PREFILL_S:
        prompt_tokens, expected = view.expected(waiting[-1])
        count = view.waiting[waiting[-1]]
        size = count * (prompt_tokens + expected)
        if room.load and not room.fits(count, size):
            return
        room.take(count, size)
        seconds += view.costs.prefill(prompt_tokens)
        yield waiting.pop()


def _size(group: list[SampleRecord]) -> tuple[int, float]:
    return len(group), sum(sample.reserved for sample in group)


class _Room:
    def __init__(self, view: Snapshot, slot: Slot):
        self.slot, self.load, self.reserved, self._costs = slot, slot.load, slot.reserved, view.costs

    def __lt__(self, other: _Room) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[float, int, int]:
        step = self.slot.rate * self._costs.decode_step(self.load, self.reserved)
        return step, self.load, self.slot.index

    def fits(self, samples: int, tokens: float) -> bool:
        more = self.load + samples <= self._costs.max_sequences
        return more and self.reserved + tokens <= self._costs.kv_tokens

    def take(self, samples: int, tokens: float) -> None:
        self.load += samples
        self.reserved += tokens
