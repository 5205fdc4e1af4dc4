"""Direct preference optimisation (trainer.task=dpo): a policy on preference pairs, against a frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlfuse.data.preferences import Preference, load_policy_preferences
from rlfuse.run.offline.task import OfflineTask
from rlfuse.samples import Row


class DirectPreferenceOptimisation(OfflineTask):
    """Pairs whose reference log-probs are computed with each batch, so that a resumed run computes the same ones."""

    def load(self, files: Sequence[str]) -> tuple[list[Preference], str]:
        return load_policy_preferences(files, self.tokenizer, self.config.data)

    async def rows(self, examples: Sequence[Preference]) -> list[Row]:
        rows = [row for pair in examples for row in pair.rows]
        reference = (await self.trainer.score(("ref",), rows))["ref"].arrays
        return [replace(row, tensors={"ref_log_probs": found}) for row, found in zip(rows, reference, strict=True)]
