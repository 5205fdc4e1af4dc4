"""Trainer rank of a reward model: a sequence classifier trained on preference pairs.

Role: `OfflineTrainer.start` runs it as Ray actors. It differs from a `TrainerRank` only in its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlfuse.config.reward_labels import head_labels
from rlfuse.config.rewards import MODEL_PART
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.models import check_forward, check_training_passes, load_reward_model
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.engines.weights.exporting import Exporter


class RewardModelRank(TrainerRank):
    """Rank of a reward model. Call `join`, then `setup`, then any other method."""

    def setup(self, padding: int | None, labels: Sequence[str]) -> dict[str, Any]:
        """Load the model; return facts to log. The head is initialised to 0 unless `model.path` has one.

        `padding`: the tokenizer's padding token, with which the saved model finds the end of a sequence. `labels`:
        outputs of the head, in order.
        """
        config, path = self.config, self.config.model.path
        torch.manual_seed(config.data.seed)
        with self.recorder.span("start", cause="run"), self.backend.loading(config):
            model = load_reward_model(path, config.model, labels)
            if not head_labels(path, config.model.trust_remote_code):
                (head,) = (m for m in model.children() if getattr(m, "out_features", None) == len(labels))
                self.backend.zero(head.parameters())
            model.config.get_text_config().pad_token_id = padding
            self.engines = {MODEL_PART: self._trainable(model, config.actor.optim)}
        if model.is_remote_code():
            check_forward(model, path)
        self.tower, self.sums, self.ropes = None, {}, {MODEL_PART: None}
        self.exporters = {MODEL_PART: Exporter(model, self.rank, sharded=self.engines[MODEL_PART])}
        self.progress.follow(model)
        self.packed = self.shares = config.model.use_remove_padding and attends_by_layout(model)
        check_training_passes(self.engines[MODEL_PART], self.packed, self.device, "reward model")
        parameters = {MODEL_PART: (sum(size for _, size in self.sizes(MODEL_PART)) // self.dtype.itemsize, 0)}
        facts = {"packed": self.packed, "shares_prompts": self.shares, "lines": self._arrange_passes()}
        return facts | {"parameters": parameters, "checkpoint_bytes": sum(self.checkpoint_bytes())}
