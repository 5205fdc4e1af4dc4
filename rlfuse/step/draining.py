"""Slots that get no work of their own: which, from when on, and how fast they are meanwhile.

Role: the controller asks for the `slot_table` of each board's slots; whoever drains and restores slots (cluster.drain, the
command by `rlfuse.run.slot_requests`) does it here, and the board that is under way follows with its next decision.
Drained slots are probed with fixed work before a board begins, beside the others, so that a person sees when one is
well again, and who was drained until then is back (`rlfuse.costs.rates`). Since when a slot is drained goes to the
run's events, for who accounts for idle time.
Invariants: one slot at least gets work; where work runs changes, never what is computed.
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
    """Of one run; `say` is told what nobody asked for."""

    def __init__(self, engines: Engines, tuning: Tuning, say: Callable[[str], object] = print):
        self.board: SlotTable | None = None
        """Of the last board that began."""
        self._engines, self._tuning, self._say = engines, tuning, say
        self._probed = dict[int, float]()
        self._since = dict.fromkeys(self.drained, clock.now())
        self._spans: list[Span] = []

    @property
    def drained(self) -> set[int]:
        """Slots that get no work."""
        return self._tuning.rates.drained

    def rate(self, slot: int) -> float:
        """Seconds its work takes for each that a typical slot's takes: as planned with, or as last probed."""
        return self._probed.get(slot, self._tuning.rates.current[slot])

    @property
    def count(self) -> int:
        """All slots of the run."""
        return len(self._engines.rollout)

    async def slot_table(self) -> SlotTable:
        """The slots of a board that begins; drained ones are probed before."""
        self._probed = {}
        if drained := set(self.drained):
            self._probed = relative_times(await self._engines.trainer.probe(), drained)
            for slot, rate in self._probed.items():
                self._tuning.rates.record_probe(slot, rate)
            for slot in sorted(drained - self.drained):
                self._note(slot, clock.now())
                self._say(f"slot {slot} works again: it is as fast as the others")
        self.board = SlotTable(self.count, self._tuning.costs, self._tuning.rates)
        return self.board

    async def drain(self, collect: bool = False) -> list[Span]:
        """When slots were drained since the last call, a span for each; no process of its own collects garbage."""
        for slot in self.drained:
            self._note(slot, clock.now())
        spans, self._spans = self._spans, []
        return spans

    def _note(self, slot: int, until: float) -> None:
        since, self._since[slot] = self._since.get(slot, until), until
        self._spans.append(Span("drained", "driver", since, until, attributes={"slot": slot}))

    def drain_slot(self, slot: int, until_recovered: bool = False) -> int:
        """It gets no more work; returns how many samples were on its engine. SlotRefused if it can't.

        `until_recovered`: it is back once it is as fast as the others, else by `restore_slot` alone.
        """
        self.require_slot(slot, "drained")
        if slot in self.drained:
            raise SlotRefused(f"slot {slot} is drained already; rlfuse slots restore {slot} has it work again")
        if len(self.drained) == self.count - 1:
            told = f"; drained already: {', '.join(map(str, sorted(self.drained)))}" if self.drained else ""
            raise SlotRefused(f"slot {slot} is the last of {self.count} that works: the run needs one{told}")
        self._tuning.rates.drain(slot, until_recovered)
        self._since[slot] = clock.now()
        return 0 if self.board is None else self.board.slots[slot].load

    def restore_slot(self, slot: int) -> None:
        """It gets work again, from now on. SlotRefused if it does already."""
        self.require_slot(slot, "restored")
        if slot not in self.drained:
            told = ", ".join(map(str, sorted(self.drained))) or "none"
            raise SlotRefused(f"slot {slot} is not drained; drained slots: {told}")
        self._tuning.rates.restore(slot)
        self._note(slot, clock.now())

    def require_slot(self, slot: int, done: str) -> None:
        """SlotRefused where there is no such slot. `done`: what was to be done to it."""
        if not 0 <= slot < self.count:
            raise SlotRefused(f"slot {slot} can't be {done}: slots of this run are 0 to {self.count - 1}")


def relative_times(speeds: Sequence[float | None], drained: Collection[int]) -> dict[int, float]:
    """Drained slot -> time relative to the median of the others; without those whose speed is not known."""
    usual = [speed for slot, speed in enumerate(speeds) if speed and slot not in drained]
    return {slot: median(usual) / speed for slot, speed in enumerate(speeds) if usual and speed and slot in drained}
