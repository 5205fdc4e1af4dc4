"""Reward modelling (trainer.task=reward_model): a classifier on preference pairs, for reward.model_path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.algorithms.preferences import calibrate
from rlfuse.cluster.placement import Slots
from rlfuse.config.reward_labels import head_labels
from rlfuse.config.schema import Config
from rlfuse.data.preferences import Preference, dimension_labels, load_preferences
from rlfuse.engines.trainer.offline_trainer import OfflineTrainer
from rlfuse.observe.calibration_plot import PICTURE
from rlfuse.observe.offline_metrics import OFFLINE, validation_names
from rlfuse.observe.run_log import RunLog
from rlfuse.run.offline.task import OfflineTask
from rlfuse.samples import Row

TRAILING_TOKEN = np.zeros(1, dtype=np.int32)
"""Appended after a row's last token, whose score is used; causal models ignore it."""


class RewardModelling(OfflineTask):
    """Pairs scored by a head with one output per label: the labels of the model, else the dimensions of the pairs."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase):
        self.labels = head_labels(config.model.path, config.model.trust_remote_code)
        super().__init__(config, tokenizer)

    def load(self, files: Sequence[str]) -> tuple[list[Preference], str]:
        pairs, report = load_preferences(files, self.tokenizer, self.config.data, self.labels)
        self.labels = self.labels or dimension_labels(pairs)
        return pairs, report

    async def rows(self, examples: Sequence[Preference]) -> list[Row]:
        return rows_of(examples, self.labels)

    async def start(self, slots: Slots) -> dict[str, Any]:
        padding = self.tokenizer.pad_token_id
        self.trainer, facts = await OfflineTrainer.start(self.config, slots, padding, self.labels)
        return facts

    async def evaluate(self, log: RunLog, step: int) -> dict[str, float]:
        """Return accuracy (overall and per dimension), calibration error, margin and loss; redraw the calibration."""
        pairs = self.held_out
        scores = await self.trainer.scores(await self.rows(pairs))
        gaps = scores[:, 0].astype(float) - scores[:, 1]
        found, target = calibrate(gaps), "rlfuse.observe.calibration_plot:draw_calibration"
        log.metrics.draw(step, PICTURE, log.folder / PICTURE, target, found, gaps)
        values = {"acc": found.accuracy, "ece": found.ece, "loss": found.loss, "margin": float(gaps.mean())}
        for dimension in dict.fromkeys(pair.dimension for pair in pairs if pair.dimension):
            selected = gaps[[pair.dimension == dimension for pair in pairs]]
            values[f"acc/{dimension}"] = calibrate(selected).accuracy
        return validation_names(OFFLINE["reward_model"], values)


def rows_of(pairs: Sequence[Preference], labels: Sequence[str]) -> list[Row]:
    """Return two rows per pair, chosen and rejected; a pair without a dimension gets the first label."""
    rows = []
    for pair in pairs:
        label = labels.index(pair.dimension) if pair.dimension else 0
        for row in pair.rows:
            response = np.concatenate([row.response_ids, TRAILING_TOKEN])
            tensors = {
                name: np.full(len(response), value, dtype=np.float32)
                for name, value in (("margin", pair.margin), ("label", label))
            }
            rows.append(replace(row, response_ids=response, tensors=tensors))
    return rows
