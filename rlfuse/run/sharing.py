"""How engines and trainer ranks share the GPUs of a run: decided once ranks have loaded and report their memory.

Role: `rlfuse.run.build` starts engines with what is decided here. The decision itself is the memory plan's
(`planning.memory`), so `rlfuse plan` shows it. Waits for the ranks to report their devices' memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlfuse.config.own_functions import replaced
from rlfuse.config.schema import Config, RolloutConfig
from rlfuse.engines.trainer.rank_group import RankGroup
from rlfuse.errors import ConfigError
from rlfuse.planning.kv_cache import SPARE
from rlfuse.planning.memory import Budget, Memory, memory_of
from rlfuse.planning.model_sizes import served_shapes, shapes_of
from rlfuse.planning.residency import ENGINE, GENERATING, MODELS, SYNC, Item
from rlfuse.planning.tables import sharing_words
from rlfuse.protocols import Sharing


class SharedDevices:
    """`rollout`: settings of the engines that start now."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._config, self._say, self.rollout = config, say, config.rollout

    async def after(self, start: Callable[[], Awaitable[tuple[RankGroup, dict]]]) -> tuple[RankGroup, dict]:
        """Start the trainer's ranks and decide; a model whose sizes are unknown takes turns with its engine."""
        (ranks, facts), sizes = await asyncio.gather(start(), asyncio.to_thread(self._sizes))
        if isinstance(sizes, ConfigError):
            if self._config.rollout.free_cache_engine is False:
                raise sizes
            self._say(f"Engines and trainer ranks take turns on each GPU, because its memory can't be planned: {sizes}")
            return ranks, facts
        memory = memory_of(self._config, sizes[0], Budget("cuda", await ranks.device_bytes()), sizes[1])
        await ranks.share(sharing_of(memory))
        self.rollout = engine_settings(self._config, memory)
        self._say("; ".join(sharing_words(self._config, memory)))
        return ranks, facts

    def _sizes(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | ConfigError:
        try:
            return shapes_of(self._config), served_shapes(self._config, "cuda")
        except ConfigError as error:
            return error


def sharing_of(memory: Memory) -> Sharing:
    """What trainer ranks are told of a device that is shared as the plan has it."""
    total, models = memory.budget.bytes, int(memory.size_of(MODELS))
    if not memory.hands_over:
        others = memory.size_of(ENGINE | {Item.RESIDENTS, Item.LAYER})
        return Sharing(hands_over=False, most=int(total - others))
    free = {phase: int((1 - SPARE) * total - memory.total(phase)) for phase in (GENERATING, SYNC)}
    return Sharing(cached=max(0, free[GENERATING]), cached_in_push=max(0, free[SYNC]), pinned=models)


def engine_settings(config: Config, memory: Memory) -> RolloutConfig:
    """`rollout` with vLLM's arguments for this memory; those of the user have the last word."""
    given: dict[str, Any] = {}
    if memory.kv_cache_bytes is not None:
        given["kv_cache_memory_bytes"] = memory.kv_cache_bytes
    if not memory.hands_over:
        given["enable_sleep_mode"] = False
        # With a given cache, vLLM only demands that so much is free when it starts.
        given["gpu_memory_utilization"] = round(memory.size_of(ENGINE) / memory.budget.bytes, 4)
    return replaced(config, {"rollout.engine_kwargs": given | config.rollout.engine_kwargs}).rollout
