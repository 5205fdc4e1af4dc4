"""Decide how engines and trainer ranks share GPU memory, from what the ranks report after loading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.rank_group import RankGroup
from rlfuse.errors import ConfigError
from rlfuse.planning.memory import Budget, memory_of
from rlfuse.planning.model_sizes import served_shapes, shapes_of
from rlfuse.planning.sharing import arguments, sharing_of, sharing_words


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
