"""Hand a slot's device over between its rollout engine and its trainer ranks.

Role: all hand-overs, for the executor of a step, weight pushes and checkpoints.

    generate               score, train, save, load          push of weights              generate
    engine awake    -->    engine asleep, ranks loaded -->   plus engine weights  --> ranks offloaded, then KV cache
                 to_ranks                             to_push                       to_engine

Invariants: a side takes the device only after the other has released it. The exception is a weight push, which copies
from the ranks' memory to the engine's weights on the same device. The memory of an engine that was just killed may
still be in use, so ranks retry for a while. Repeated hand-overs to the same side are no error. The contents of a device
in each phase are listed in `engines.memory.residency`. On CPU hosts no memory moves. If both sides fit on the device
(`DeviceSharing.alternates` is False), both stay resident and no call is made.
Waits: for the engine and the ranks, each bounded by its own limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from rlfuse.protocols import DeviceSharing, Part


class Sleeper(Protocol):
    """An engine that can release its device."""

    async def sleep(self, discard: bool = False) -> None: ...

    async def wake(self, part: Part | None = None) -> None: ...


class Ranks(Protocol):
    """Trainer ranks, addressed by slot."""

    sharing: DeviceSharing

    async def acquire_device(self, slot: int) -> None: ...

    async def release_device(self, slot: int) -> None: ...


class PushingRanks(Ranks, Protocol):
    """Trainer ranks that push weights."""

    async def make_room(self, slot: int) -> None: ...


async def to_ranks(engine: Sleeper, ranks: Ranks, slot: int, discard: bool = False) -> None:
    """Give the slot's device to its ranks. Its engine must not be generating.

    `discard`: nothing is generated before the next push, so the engine's weights need not be kept.
    """
    if ranks.sharing.alternates:
        await engine.sleep(discard)
        await ranks.acquire_device(slot)


async def to_push(engine: Sleeper, ranks: PushingRanks, slot: int) -> None:
    """Share the slot's device between its ranks and its engine's weights, for a weight push."""
    if ranks.sharing.alternates:
        await to_ranks(engine, ranks, slot, discard=True)
        await ranks.make_room(slot)
        await engine.wake("weights")


async def to_engine(engine: Sleeper, ranks: Ranks, slot: int) -> None:
    """Give the slot's device to its engine and wake the engine completely."""
    await vacate_device(ranks, slot)
    if ranks.sharing.alternates:
        await engine.wake()


async def vacate_device(ranks: Ranks, slot: int) -> None:
    """Offload the slot's ranks, so that an engine can start on its device."""
    if ranks.sharing.alternates:
        await ranks.release_device(slot)


async def hand_over_all(give: Callable, engines: Sequence[Sleeper], ranks: Ranks) -> None:
    """Hand over every device concurrently; `give` is `to_ranks` or `to_engine`."""
    await asyncio.gather(*(give(engine, ranks, slot) for slot, engine in enumerate(engines)))
