"""Driver-side group of ranks that train a reward model on preference pairs.

Role: used by `rlfuse.run.reward_model`, over `RewardModelRank` actors. A pair is two rows in one micro-batch, chosen
before rejected, that share their common prefix as a prompt, so that it is computed once.
Invariants and waits: as of `TrainerGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlfuse.cluster.placement import Slots
from rlfuse.config.rewards import MODEL_PART
from rlfuse.config.schema import Config
from rlfuse.data.preferences import Preference
from rlfuse.engines.trainer.rank_group import start_ranks, step_metrics
from rlfuse.engines.trainer.sequence_parallel_packing import Unit
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.samples import Row

TRAILING_TOKEN = np.zeros(1, dtype=np.int32)
"""Appended after a row's last token, whose score is used; causal models ignore it."""


class RewardModelTrainer(TrainerGroup):
    """Group of reward-model ranks, one on every slot."""

    @classmethod
    async def start(
        cls, config: Config, slots: Slots, padding: int | None, labels: Sequence[str]
    ) -> tuple[RewardModelTrainer, dict[str, Any]]:
        """Start ranks and load their models; return the group and facts to log.

        `padding`, `labels`: as in `RewardModelRank.setup`.
        """
        from rlfuse.engines.trainer.reward_model_rank import RewardModelRank

        group = cls(config, await start_ranks(RewardModelRank, config, slots, slots.cores))
        group.labels = labels
        return group, await group._load(padding, labels)

    @property
    def models(self) -> tuple[str, ...]:
        return (MODEL_PART,)

    async def learn(self, pairs: Sequence[Preference], lr_factor: float = 1.0) -> dict[str, float]:
        """Take one optimizer step over these pairs; return the means `reward_model/{loss, acc, margin, ...}`.

        `lr_factor`: fraction of the full learning rate.
        """
        rows = rows_of(pairs, self.labels)
        await self.accumulate((MODEL_PART,), rows)
        self._accumulated[MODEL_PART] = []
        sums = await self._all("step", "update the reward model", MODEL_PART, len(pairs), lr_factor)
        return step_metrics(MODEL_PART, sums, len(pairs), [1] * len(pairs))

    async def scores(self, pairs: Sequence[Preference]) -> np.ndarray:
        """Return the scores of chosen and rejected responses on the pair's dimension, float32 [pairs, 2]."""
        found = (await self.score((MODEL_PART,), rows_of(pairs, self.labels)))[MODEL_PART].arrays
        return np.array([scores[-1] for scores in found], dtype=np.float32).reshape(-1, 2)

    def _units(self, rows: Sequence[Row], capacity: int, ranks: int) -> list[Unit]:
        tokens = [first.tokens + second.tokens for first, second in zip(rows[::2], rows[1::2], strict=True)]
        return [Unit((2 * i, 2 * i + 1), size, size**2 / 2) for i, size in enumerate(tokens)]


def rows_of(pairs: Sequence[Preference], labels: Sequence[str]) -> list[Row]:
    """Return two rows per pair, chosen and rejected; a pair without a dimension gets the first label."""
    rows = []
    for pair in pairs:
        for side, ids in (("chosen", pair.chosen_ids), ("rejected", pair.rejected_ids)):
            alone = int(not len(pair.shared_ids))  # without a common prefix the prompt is the row's first token
            prompt, response = (ids[:1] if alone else pair.shared_ids), np.concatenate([ids[alone:], TRAILING_TOKEN])
            label = labels.index(pair.dimension) if pair.dimension else 0
            tensors = {
                name: np.full(len(response), value, dtype=np.float32)
                for name, value in (("margin", pair.margin), ("label", label))
            }
            rows.append(Row(prompt, response, tensors, f"{pair.index}/{side}"))
    return rows
