"""Who has a slot's device: its rollout engine or its trainer ranks, which share it.

Role: every change of hands, for the executor of a step, the push of weights, and checkpoints.

    generate               score, train, save, load          push of weights              generate
    engine awake    -->    engine asleep, ranks there  -->   and the engine's weights --> ranks away, then the KV cache
                 to_ranks                             to_push                       to_engine

Invariants: nobody takes a device before the other has left it, but for the engine's weights during a push, which goes
from the ranks' memory to the engine's on the same device (an engine that was killed a moment ago may still hold some:
ranks try again for a while); a turn that somebody has already is no error. What lies on a device in each phase is in
`engines.memory.residency`. On CPU hosts nothing moves: the same calls only change who may work. Where both sides fit on
the device (`DeviceSharing.alternates` is False), both stay there and no call is made.
Waits: for the engine and the ranks, each bounded by its own limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from rlfuse.protocols import DeviceSharing, Part


class Sleeper(Protocol):
    """An engine that can give its device up."""

    async def sleep(self, discard: bool = False) -> None: ...

    async def wake(self, part: Part | None = None) -> None: ...


class Ranks(Protocol):
    """The trainer's ranks, by slot."""

    sharing: DeviceSharing

    async def acquire_device(self, slot: int) -> None: ...

    async def release_device(self, slot: int) -> None: ...


class PushingRanks(Ranks, Protocol):
    """Those that push weights."""

    async def make_room(self, slot: int) -> None: ...


async def to_ranks(engine: Sleeper, ranks: Ranks, slot: int, discard: bool = False) -> None:
    """The slot's ranks have its device when this returns; nothing is being generated there.

    `discard`: nothing is generated before the next push, so the engine's weights need not be kept until then.
    """
    if ranks.sharing.alternates:
        await engine.sleep(discard)
        await ranks.acquire_device(slot)


async def to_push(engine: Sleeper, ranks: PushingRanks, slot: int) -> None:
    """The slot's ranks and its engine's weights share the device when this returns."""
    if ranks.sharing.alternates:
        await to_ranks(engine, ranks, slot, discard=True)
        await ranks.make_room(slot)
        await engine.wake("weights")


async def to_engine(engine: Sleeper, ranks: Ranks, slot: int) -> None:
    """The slot's engine has its device when this returns, all of what it had put to sleep."""
    await vacate_device(ranks, slot)
    if ranks.sharing.alternates:
        await engine.wake()


async def vacate_device(ranks: Ranks, slot: int) -> None:
    """An engine can start on the slot's device when this returns."""
    if ranks.sharing.alternates:
        await ranks.release_device(slot)


async def hand_over_all(give: Callable, engines: Sequence[Sleeper], ranks: Ranks) -> None:
    """Every device at once; `give` is `to_ranks` or `to_engine`."""
    await asyncio.gather(*(give(engine, ranks, slot) for slot, engine in enumerate(engines)))
