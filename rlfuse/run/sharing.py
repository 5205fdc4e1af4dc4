"""How engines and trainer ranks share the GPUs of a run: decided before ranks load models, by their devices' memory.

Role: `rlfuse.run.build` starts engines with what is decided here. The decision itself is the memory plan's
(`planning.memory`), so `rlfuse plan` shows it. Waits for the ranks to report their devices' memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.rank_group import RankGroup
from rlfuse.errors import ConfigError
from rlfuse.planning.memory import Budget, Memory, memory_of
from rlfuse.planning.model_sizes import served_shapes, shapes_of
from rlfuse.planning.remedies import remedies
from rlfuse.planning.sharing import arguments, sharing_of, sharing_words
from rlfuse.planning.shortages import problems
from rlfuse.run.starting import Start

FORCED = (
    "rollout.free_cache_engine=false: engine and trainer rank do not fit on a GPU together; set it to null, so that "
    "they take turns"
)


class SharedDevices:
    """`rollout`: settings of the engines that start now."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._config, self._say, self.rollout = config, say, config.rollout

    async def start(self, trainer: Start, let_engines_start: Callable[[], None]) -> tuple[RankGroup, dict]:
        """Start the trainer's ranks, and decide when they have met.

        Engines can start while the ranks load models if both fit and vLLM is given the size of its cache; else it
        would measure the memory that the ranks leave free. Where memory can't be planned, both sides take turns;
        ConfigError if the job asks for more than turns then.
        """
        sizes, memory = asyncio.create_task(asyncio.to_thread(self._sizes)), None

        async def decide(ranks: RankGroup) -> None:
            nonlocal memory
            if memory := await self._plan(sizes, ranks):
                kwargs = arguments(memory) | self._config.rollout.engine_kwargs
                self.rollout = replace(self._config.rollout, engine_kwargs=kwargs)
                self._say("; ".join(sharing_words(self._config, memory)))
                if not memory.hands_over and kwargs.get("kv_cache_memory_bytes"):
                    let_engines_start()

        ranks, facts = await trainer(decide)
        if memory:
            await ranks.share(sharing_of(memory))
        return ranks, facts

    async def _plan(self, sizes: asyncio.Task, ranks: RankGroup) -> Memory | None:
        try:
            shapes, served = await sizes
            budget = Budget("cuda", await ranks.device_bytes())
            memory = await asyncio.to_thread(memory_of, self._config, shapes, budget, served)
            if self._config.rollout.free_cache_engine is False and (lacking := problems(self._config, memory)):
                helps = await asyncio.to_thread(remedies, self._config, shapes, budget, served)
                raise ConfigError([f"{FORCED}. {each} {helps}" for each in lacking])
            return memory
        except ConfigError as error:
            if self._config.rollout.free_cache_engine is False:
                raise
            self._say(f"Engines and trainer ranks take turns on each GPU, because its memory can't be planned: {error}")
            return None

    def _sizes(self) -> tuple:
        return shapes_of(self._config), served_shapes(self._config, "cuda")
