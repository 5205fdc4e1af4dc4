"""Supervised fine-tuning (trainer.task=sft): a policy on demonstrations, by the log-likelihood of assistant tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rlfuse.data.demonstrations import Demonstration, load_demonstrations
from rlfuse.run.offline.task import OfflineTask
from rlfuse.samples import Row


class SupervisedFineTuning(OfflineTask):
    """Demonstrations in any order; the loss is a mean over the batch's assistant tokens."""

    def load(self, files: Sequence[str]) -> tuple[list[Demonstration], str]:
        return load_demonstrations(files, self.tokenizer, self.config.data)

    async def rows(self, examples: Sequence[Demonstration]) -> list[Row]:
        return [each.row for each in examples]
