"""Start the parts of a job: in parallel on CPU hosts, in sequence where they share GPUs.

vLLM reserves a fraction of the GPU and fails if memory is freed meanwhile. So on GPUs trainer ranks load and offload
before engines start, unless the memory plan says that both fit, and reward models use what engines leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from rlfuse.config.schema import Config
from rlfuse.engines.colocation import leave
from rlfuse.engines.trainer.rank_group import RankGroup
from rlfuse.errors import ConfigError
from rlfuse.planning.memory import Budget, memory_of
from rlfuse.planning.model_sizes import served_shapes, shapes_of
from rlfuse.planning.sharing import arguments, sharing_of, sharing_words
from rlfuse.protocols import Sharing

Facts = dict[str, Any]
MEASURING = "speed of the ranks"


class Ranks(Protocol):
    """Of a trainer."""

    sharing: Sharing

    async def measure(self) -> Facts: ...

    async def leave_device(self, slot: int) -> None: ...


Start = Callable[[], Awaitable[Any]]


class Started(NamedTuple):
    """What stands. On GPUs the engines have the devices, and no rank is on one."""

    trainer: Any
    trainer_facts: Facts
    engine_facts: list[Facts]


async def start_parts(
    device: str,
    *,
    trainer: Callable[[], Awaitable[tuple[Ranks, Facts]]],
    engines: Sequence[Callable[[], Awaitable[Facts]]],
    towers: Sequence[Start] = (),
    rewards: Sequence[Start] = (),
    part: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> Started:
    """Start all of them, in the order that the device needs; `part`: by which the user sees what else takes time."""
    if device == "cpu":
        # Engines take longest, and the driver stands still when it starts ranks: it imports DeepSpeed.
        *found, (ranks, facts) = await _together(*engines, *rewards, *towers, trainer)
        with part(MEASURING):
            return Started(ranks, facts | await ranks.measure(), found[: len(engines)])
    (ranks, facts), *_ = await _together(trainer, *towers)
    with part(MEASURING):
        measured = await ranks.measure()
    with part("ranks leave the devices"):
        await asyncio.gather(*(leave(ranks, slot) for slot in range(len(engines))))
    engine_facts = await _together(*engines)
    await _together(*rewards)
    return Started(ranks, facts | measured, engine_facts)


def within(part: AbstractContextManager[None], start: Callable[..., Awaitable[Any]], *arguments: Any) -> Start:
    """`start` with these arguments; by `part` the person sees that it is under way, and how long it took."""

    async def started() -> Any:
        with part:
            return await start(*arguments)

    return started


async def end_all(ends: Iterable[Awaitable[Any]]) -> None:
    """Give every worker a moment to end by itself; those that can't are killed with the cluster."""
    await asyncio.gather(*(asyncio.wait_for(end, 10) for end in ends), return_exceptions=True)


async def _together(*starts: Start) -> list[Any]:
    return await asyncio.gather(*(start() for start in starts))


class SharedDevices:
    """`rollout`: settings of the engines that start now."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._config, self._say, self.rollout = config, say, config.rollout

    async def after(self, start: Callable[[], Awaitable[tuple[RankGroup, dict]]]) -> tuple[RankGroup, dict]:
        """Start trainer ranks and decide; without a memory plan they alternate with engines."""
        sizes = asyncio.create_task(asyncio.to_thread(self._sizes))
        ranks, facts = await start()
        try:
            shapes, served = await sizes
            budget = Budget("cuda", await ranks.device_bytes())
            memory = await asyncio.to_thread(memory_of, self._config, shapes, budget, served)
        except ConfigError as error:
            if self._config.rollout.free_cache_engine is False:
                raise
            self._say(f"Engines and trainer ranks take turns on each GPU, because its memory can't be planned: {error}")
            return ranks, facts
        await ranks.share(sharing_of(memory))
        kwargs = arguments(memory) | self._config.rollout.engine_kwargs
        self.rollout = replace(self._config.rollout, engine_kwargs=kwargs)
        self._say("; ".join(sharing_words(self._config, memory)))
        return ranks, facts

    def _sizes(self) -> tuple:
        return shapes_of(self._config), served_shapes(self._config, "cuda")
