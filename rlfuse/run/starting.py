"""Start the parts of a job: concurrently on CPU hosts, and on GPUs if the memory plan has room for all of them.

vLLM fails if another process releases memory while it measures the size of its KV cache. On GPUs, engines therefore
start after the ranks have released the devices, unless both fit and the cache size is given. The first failure is
raised; the caller stops the other parts. Reward models use the memory that engines leave free:

    alternating    trainer ranks, towers --> ranks release the devices --> rollout engines --> rewards
    both fit       trainer ranks joined --> their models, towers | rollout engines --> rewards
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import Budget, Memory, memory_of
from rlfuse.engines.memory.model_sizes import served_shapes, shapes_of
from rlfuse.engines.memory.remedies import problems, remedies
from rlfuse.engines.memory.sharing import describe_sharing, device_sharing
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.engines.trainer.rank_group import RankGroup
from rlfuse.errors import ConfigError
from rlfuse.protocols import DeviceSharing
from rlfuse.step.colocation import vacate_device

Facts = dict[str, Any]
MEASURING = "speed of the ranks"
DOES_NOT_FIT = (
    "rollout.free_cache_engine=false: engine and trainer rank do not fit on a GPU together; set it to null, so that "
    "they alternate"
)


class Ranks(Protocol):
    """Ranks of a trainer, as needed at startup."""

    sharing: DeviceSharing

    async def measure(self) -> Facts: ...

    async def release_device(self, slot: int) -> None: ...


Start = Callable[..., Awaitable[Any]]
"""Starts a part, which is ready when the returned awaitable completes."""
TrainerStart = Callable[[Callable[[], None]], Awaitable[tuple[Ranks, Facts]]]
"""Starts the trainer; its argument is to be called before loading models if engines can start at the same time."""


class StartedParts(NamedTuple):
    """Started parts of a job. On GPUs, the engines are on the devices and the ranks are not."""

    trainer: Any
    trainer_facts: Facts
    engine_facts: list[Facts]


async def start_parts(
    device: str,
    *,
    trainer: TrainerStart,
    engines: Sequence[Callable[[], Awaitable[Facts]]],
    towers: Sequence[Start] = (),
    rewards: Sequence[Start] = (),
    part: Callable[[str], AbstractContextManager[None]] = nullcontext,
) -> StartedParts:
    """Start all parts, in the order that the device requires. `part`: progress display of further work."""
    can_start = asyncio.Event()
    if device == "cpu":
        can_start.set()

    async def measure(ranks: Ranks) -> Facts:
        with part(MEASURING):
            return await ranks.measure()

    async def load() -> tuple[Ranks, Facts, Facts | None]:
        (ranks, facts), *_ = await _start_all(partial(trainer, can_start.set), *towers)
        if can_start.is_set():
            return ranks, facts, None
        measured = await measure(ranks)
        with part("ranks release the devices"):
            await asyncio.gather(*(vacate_device(ranks, slot) for slot in range(len(engines))))
        can_start.set()
        return ranks, facts, measured

    async def start_engines() -> list[Facts]:
        await can_start.wait()
        return await _start_all(*engines)

    early, late = (rewards, ()) if device == "cpu" else ((), rewards)
    engine_facts, (ranks, facts, measured), *_ = await _start_all(start_engines, load, *early)
    await _start_all(*late)
    return StartedParts(ranks, facts | (await measure(ranks) if measured is None else measured), engine_facts)


def with_progress(part: AbstractContextManager[None], start: Callable[..., Awaitable[Any]], *arguments: Any) -> Start:
    """Return a start function for `start(*arguments)` that shows its progress and duration as `part`."""

    async def started(*more: Any) -> Any:
        with part:
            return await start(*arguments, *more)

    return started


async def end_all(ends: Iterable[Awaitable[Any]]) -> None:
    """Wait up to 10 s for each worker to exit; the others are killed with the cluster."""
    await asyncio.gather(*(asyncio.wait_for(end, 10) for end in ends), return_exceptions=True)


async def _start_all(*starts: Start) -> list[Any]:
    return await asyncio.gather(*(start() for start in starts))


class SharedDevices:
    """Decides whether engines and trainer ranks share the devices. `rollout`: settings of the engines to start."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._config, self._say, self.rollout = config, say, config.rollout

    async def start(self, trainer: Start, let_engines_start: Callable[[], None]) -> tuple[RankGroup, dict]:
        """Start the trainer's ranks, and decide about sharing once they have joined.

        Engines can start while the ranks load models if both fit and vLLM is given the size of its cache; otherwise
        it would measure the memory that the ranks leave free. If memory can't be planned, both alternate. Raises
        ConfigError if rollout.free_cache_engine=false is not possible.
        """
        sizes, memory = asyncio.create_task(asyncio.to_thread(self._sizes)), None

        async def decide(ranks: RankGroup) -> None:
            nonlocal memory
            if memory := await self._plan(sizes, ranks):
                rollout = self._config.rollout
                self.rollout, together = engine_actor(rollout.name).apply_memory_plan(rollout, memory)
                self._say("; ".join(describe_sharing(self._config, memory)))
                if together:
                    let_engines_start()

        ranks, facts = await trainer(decide)
        if memory:
            await ranks.share(device_sharing(memory))
        return ranks, facts

    async def _plan(self, sizes: asyncio.Task, ranks: RankGroup) -> Memory | None:
        try:
            shapes, served = await sizes
            budget = Budget("cuda", await ranks.device_bytes())
            memory = await asyncio.to_thread(memory_of, self._config, shapes, budget, served)
            if self._config.rollout.free_cache_engine is False and (lacking := problems(self._config, memory)):
                helps = await asyncio.to_thread(remedies, self._config, shapes, budget, served)
                raise ConfigError([f"{DOES_NOT_FIT}. {each} {helps}" for each in lacking])
            return memory
        except ConfigError as error:
            if self._config.rollout.free_cache_engine is False:
                raise
            self._say(f"Engines and trainer ranks alternate on each GPU, because its memory can't be planned: {error}")
            return None

    def _sizes(self) -> tuple:
        return shapes_of(self._config), served_shapes(self._config, "cuda")
