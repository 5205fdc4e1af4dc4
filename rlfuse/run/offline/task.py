"""Interface of an offline task: examples from files, their rows, and the values of training and validation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlfuse.cluster.placement import Slots
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.offline_trainer import OfflineTrainer
from rlfuse.observe.offline_metrics import OFFLINE, validation_names
from rlfuse.observe.run_log import RunLog
from rlfuse.samples import Row


class OfflineTask(ABC):
    """A task with its data. Call `start` before `learn` and `evaluate`."""

    trainer: OfflineTrainer

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase):
        """Load the training and validation files. Raises DataError or ConfigError."""
        self.config, self.tokenizer, files = config, tokenizer, config.data.val_files
        self.examples, report = self.load(config.data.train_files)
        self.held_out, more = self.load(files) if files else ([], "")
        self.report = f"{report}\n{more}".strip()

    @abstractmethod
    def load(self, files: Sequence[str]) -> tuple[list[Any], str]:
        """Return the examples of these files and a summary line."""

    @abstractmethod
    async def rows(self, examples: Sequence[Any]) -> list[Row]:
        """Return the rows of these examples, with all that the loss reads."""

    async def start(self, slots: Slots) -> dict[str, Any]:
        """Start the trainer ranks; return facts to log."""
        self.trainer, facts = await OfflineTrainer.start(self.config, slots)
        return facts

    async def learn(self, examples: Sequence[Any], lr_factor: float) -> dict[str, float]:
        """Take one optimizer step over these examples; return its metrics."""
        return await self.trainer.learn(await self.rows(examples), lr_factor)

    async def evaluate(self, log: RunLog, step: int) -> dict[str, float]:
        """Return the metrics of the validation examples."""
        found = await self.trainer.evaluate(await self.rows(self.held_out))
        return validation_names(OFFLINE[self.config.trainer.task], found)
