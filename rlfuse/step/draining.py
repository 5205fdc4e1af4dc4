"""Drain and restore slots: a drained slot gets no work, except calls that involve all ranks.

Role: the controller gets the `slot_table` of each board from here. cluster.drain and `rlfuse slots` (by
`rlfuse.run.slot_requests`) drain and restore slots here; the running board follows with its next decision. Before each
board, drained slots run a fixed probe together with the others, which shows when one has recovered; slots drained until
recovery are then restored (`rlfuse.costs.rates`). Drained time is recorded as spans, for the accounting of idle time.
Invariants: at least one slot gets work; draining changes where work runs, never what is computed.
Waits: for a probe, bounded as every call of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from statistics import median

from rlfuse import clock
from rlfuse.errors import SlotRefused
from rlfuse.events import Span
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.fusion.tuning import Tuning
from rlfuse.protocols import Engines


class Draining:
    """Drained slots of one run. `say` prints automatic changes for the user."""

    def __init__(self, engines: Engines, tuning: Tuning, say: Callable[[str], object] = print):
        self.board: SlotTable | None = None
        """Slots of the latest board."""
        self._engines, self._tuning, self._say = engines, tuning, say
        self._probed = dict[int, float]()
        self._since = dict.fromkeys(self.drained, clock.now())
        self._spans: list[Span] = []

    @property
    def drained(self) -> set[int]:
        """Return the drained slots."""
        return self._tuning.rates.drained

    def rate(self, slot: int) -> float:
        """Return the relative time of the slot's work (1: a typical slot), as planned with or last probed."""
        return self._probed.get(slot, self._tuning.rates.current[slot])

    @property
    def count(self) -> int:
        """Return the number of slots of the run."""
        return len(self._engines.rollout)

    async def slot_table(self) -> SlotTable:
        """Probe the drained slots and return the slots of a new board."""
        self._probed = {}
        if drained := set(self.drained):
            self._probed = relative_times(await self._engines.trainer.probe(), drained)
            for slot, rate in self._probed.items():
                self._tuning.rates.record_probe(slot, rate)
            for slot in sorted(drained - self.drained):
                self._note(slot, clock.now())
                self._say(f"Slot {slot} is back to normal speed; resuming work on it.")
        self.board = SlotTable(self.count, self._tuning.costs, self._tuning.rates)
        return self.board

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return a span for each interval in which a slot was drained since the last call. `collect` is ignored."""
        for slot in self.drained:
            self._note(slot, clock.now())
        spans, self._spans = self._spans, []
        return spans

    def _note(self, slot: int, until: float) -> None:
        since, self._since[slot] = self._since.get(slot, until), until
        self._spans.append(Span("drained", "driver", since, until, attributes={"slot": slot}))

    def drain_slot(self, slot: int, until_recovered: bool = False) -> int:
        """Drain a slot and return the number of samples on its engine. Raises SlotRefused if it cannot be drained.

        `until_recovered`: restore it automatically once it is as fast as the others.
        """
        self.require_slot(slot, "drained")
        if slot in self.drained:
            raise SlotRefused(f"slot {slot} is already drained. To restore it, run `rlfuse slots restore {slot}`.")
        if len(self.drained) == self.count - 1:
            others = f" (drained: {', '.join(map(str, sorted(self.drained)))})" if self.drained else ""
            raise SlotRefused(f"slot {slot} is the last working slot of {self.count}{others}; a run needs one")
        self._tuning.rates.drain(slot, until_recovered)
        self._since[slot] = clock.now()
        return 0 if self.board is None else self.board.slots[slot].load

    def restore_slot(self, slot: int) -> None:
        """Restore a drained slot. Raises SlotRefused if it is not drained."""
        self.require_slot(slot, "restored")
        if slot not in self.drained:
            drained = ", ".join(map(str, sorted(self.drained))) or "none"
            raise SlotRefused(f"slot {slot} is not drained; drained slots: {drained}")
        self._tuning.rates.restore(slot)
        self._note(slot, clock.now())

    def require_slot(self, slot: int, done: str) -> None:
        """Raise SlotRefused if there is no such slot. `done`: the requested change, for the message."""
        if not 0 <= slot < self.count:
            raise SlotRefused(f"slot {slot} cannot be {done}: this run has slots 0 to {self.count - 1}")


def relative_times(speeds: Sequence[float | None], drained: Collection[int]) -> dict[int, float]:
    """Return drained slot -> time relative to the median of the others, for slots with known speed."""
    usual = [speed for slot, speed in enumerate(speeds) if speed and slot not in drained]
    return {slot: median(usual) / speed for slot, speed in enumerate(speeds) if usual and speed and slot in drained}
