"""Driver-side group of ranks that train one model on a fixed dataset: demonstrations or preference pairs.

A pair is two rows in one micro-batch, chosen before rejected, that share their prompt, so that it is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlfuse.cluster.placement import Slots
from rlfuse.config.rewards import MODEL_PART
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.rank_group import start_ranks, step_metrics
from rlfuse.engines.trainer.sequence_parallel_packing import Unit, fill
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.samples import Row


class OfflineTrainer(TrainerGroup):
    """Group of ranks, one on every slot. In a task on pairs, each two consecutive rows are one."""

    @classmethod
    async def start(
        cls, config: Config, slots: Slots, padding: int | None = None, labels: Sequence[str] = ()
    ) -> tuple[OfflineTrainer, dict[str, Any]]:
        """Start ranks and load their models; return the group and facts to log.

        `padding`, `labels`: as in `RewardModelRank.setup`, used only for reward models.
        """
        from rlfuse.engines.trainer.reward_model_rank import RewardModelRank
        from rlfuse.engines.trainer.trainer_rank import TrainerRank

        scores = config.trainer.task == "reward_model"
        group = cls(config, await start_ranks(RewardModelRank if scores else TrainerRank, config, slots, slots.cores))
        facts = await group._load(*((padding, labels) if scores else ()))
        group.shares_prompts = facts.pop("shares_prompts")
        return group, facts

    @property
    def model(self) -> str:
        """Name of the trained model, and of its folder in checkpoints."""
        return MODEL_PART if self.config.trainer.task == "reward_model" else "actor"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    @property
    def has_pairs(self) -> bool:
        return self.config.trainer.task != "sft"

    async def learn(self, rows: Sequence[Row], lr_factor: float = 1.0) -> dict[str, float]:
        """Take one optimizer step over these rows; return its mean diagnostics, as `step_metrics`.

        Means are over pairs, or over the tokens with a loss. `lr_factor`: fraction of the full learning rate.
        """
        await self.accumulate(self.models, rows)
        self._accumulated[self.model] = []
        count = self._count(rows)
        sums = await self._all("step", f"update the {self.model}", self.model, count, lr_factor)
        return step_metrics(self.model, sums, count, [count])

    async def evaluate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the mean diagnostics of these rows, as `learn`, without training on them."""
        shares, count = self._plan(rows, None), self._count(rows)
        batches = fill(shares, rows)
        sums = await self._call(
            "evaluate", f"evaluate the {self.model}", None, lambda rank: (self.model, batches[rank])
        )
        return step_metrics(self.model, [(each, {}) for each in sums], count, [count])

    async def scores(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the reward model's scores of chosen and rejected rows, float32 [pairs, 2]."""
        found = (await self.score((MODEL_PART,), rows))[MODEL_PART].arrays
        return np.array([scores[-1] for scores in found], dtype=np.float32).reshape(-1, 2)

    def _count(self, rows: Sequence[Row]) -> int:
        return len(rows) // 2 if self.has_pairs else sum(row.length for row in rows)

    def _units(self, rows: Sequence[Row], capacity: int, ranks: int) -> list[Unit]:
        if not self.has_pairs:
            return super()._units(rows, capacity, ranks)
        tokens = [first.tokens + second.tokens for first, second in zip(rows[::2], rows[1::2], strict=True)]
        return [Unit((2 * i, 2 * i + 1), size, size**2 / 2) for i, size in enumerate(tokens)]
