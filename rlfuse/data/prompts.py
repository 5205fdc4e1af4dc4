"""Prompts ready to generate from, and the order in which a run takes them.

Role: `load_prompts` is called by the run before Ray starts, `PromptSource` by the controller at every step.
Invariants: order depends on the seed and the epoch alone, so a resumed run needs only how many batches were taken; a
prompt never exceeds data.max_prompt_length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.config.schema import DataConfig
from rlfuse.data.rows import DataError, DataRow, read_rows
from rlfuse.samples import Prompt


@dataclass(slots=True)
class LoadReport:
    """What became of the rows of some files."""

    files: list[str]
    kept: int = 0
    dropped: int = 0
    cut: int = 0
    limit: int = 0

    def __str__(self) -> str:
        notes = [f"{self.dropped} dropped (over {self.limit} tokens)"] if self.dropped else []
        notes += [f"{self.cut} cut to {self.limit} tokens"] if self.cut else []
        return f"data  {self.kept} prompts from {', '.join(self.files)}" + "".join(f", {note}" for note in notes)


def load_prompts(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> tuple[list[Prompt], LoadReport]:
    """Read, template, tokenise and fit the rows of all files; raises DataError naming file, row and field."""
    prompts: list[Prompt] = []
    report = LoadReport([str(file) for file in files], limit=data.max_prompt_length)
    for file in files:
        for number, row in enumerate(read_rows(file, data.prompt_key)):
            text, ids = _tokenise(row, tokenizer)
            if len(ids) > data.max_prompt_length:
                if data.filter_overlong_prompts:
                    report.dropped += 1
                    continue
                ids = _fit(ids, data, f"{file}, row {number}")
                report.cut += 1
            prompts.append(
                Prompt(
                    len(prompts),
                    np.asarray(ids, dtype=np.int32),
                    text,
                    row.messages,
                    row.data_source,
                    row.ground_truth,
                    row.columns,
                )
            )
    if not prompts:
        raise DataError(
            f"{', '.join(report.files)}: no prompt is left, all {report.dropped} are longer than "
            f"data.max_prompt_length={data.max_prompt_length}. Raise it."
        )
    report.kept = len(prompts)
    return prompts, report


def _tokenise(row: DataRow, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """The prompt as text and tokens: through the chat template if the tokenizer has one, else as the text stands."""
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True)
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]
    text = "\n".join(str(message["content"]) for message in row.messages)
    return text, tokenizer(text)["input_ids"]


def _fit(ids: list[int], data: DataConfig, where: str) -> list[int]:
    """The prompt cut to length, keeping what data.truncation says."""
    limit = data.max_prompt_length
    if data.truncation == "error":
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}. Raise it, drop such rows "
            "with data.filter_overlong_prompts=true, or cut them with data.truncation=left|right|middle."
        )
    if data.truncation == "left":
        return ids[-limit:]
    if data.truncation == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


class PromptSource:
    """Batches of prompts, epoch after epoch; what is left over at the end of an epoch is not used."""

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, shuffle: bool, seed: int):
        if len(prompts) < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {len(prompts)} prompts of data.train_files. "
                "Lower it or add data."
            )
        self.prompts, self.batch_size, self.shuffle, self.seed = prompts, batch_size, shuffle, seed
        self.taken = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the prompts."""
        return len(self.prompts) // self.batch_size

    @property
    def epoch(self) -> int:
        """Passes completed."""
        return self.taken // self.steps_per_epoch

    def next_batch(self) -> list[Prompt]:
        """The batch after the last one taken."""
        position = self.taken % self.steps_per_epoch
        order = np.arange(len(self.prompts))
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.prompts))
        self.taken += 1
        return [self.prompts[i] for i in order[position * self.batch_size : (position + 1) * self.batch_size]]

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data."""
        return {"taken": self.taken, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind a checkpoint's last batch."""
        self.taken = state["taken"]
