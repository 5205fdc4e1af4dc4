"""Whose turn a slot's device is: its rollout engine's or its trainer ranks', who share it.

Role: every change of hands, for the executor of a step, the push of weights, and checkpoints.

    generate               score, train, save, load          push of weights              generate
    engine awake    -->    engine asleep, ranks there  -->   and the engine's weights --> ranks away, then the KV cache
                 to_ranks                           wake("weights")                to_engine

Invariants: nobody takes a device before the other has left it, but for the engine's weights during a push, which goes
from the ranks' memory to the engine's on the same device (an engine that was killed a moment ago may still hold some:
ranks try again for a while); a turn that somebody has already is no error. What lies on a device in each phase is in
`planning.residency`. On CPU hosts nothing moves: the same calls only change who may work.
Waits: for the engine and the ranks, each bounded by its own limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from rlfuse.protocols import Part


class Sleeper(Protocol):
    """An engine that can give its device up."""

    async def sleep(self) -> None: ...

    async def wake(self, part: Part | None = None) -> None: ...


class Ranks(Protocol):
    """The trainer's ranks, by slot."""

    async def take_device(self, slot: int) -> None: ...

    async def leave_device(self, slot: int) -> None: ...


async def to_ranks(engine: Sleeper, ranks: Ranks, slot: int) -> None:
    """The slot's ranks have its device when this returns; nothing is being generated there."""
    await engine.sleep()
    await ranks.take_device(slot)


async def to_engine(engine: Sleeper, ranks: Ranks, slot: int) -> None:
    """The slot's engine has its device when this returns, all of what it had put to sleep."""
    await ranks.leave_device(slot)
    await engine.wake()


async def all_to(give: Callable, engines: Sequence[Sleeper], ranks: Ranks) -> None:
    """Every device at once; `give` is `to_ranks` or `to_engine`."""
    await asyncio.gather(*(give(engine, ranks, slot) for slot, engine in enumerate(engines)))
