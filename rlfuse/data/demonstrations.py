"""Load demonstrations for supervised fine-tuning: rows with `messages`, or with a prompt and its `completion`.

A malformed row is a `DataError` with file, row and field. Sequences are never truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlfuse.config.schema import DataConfig
from rlfuse.data.conversations import ConversationTokenizer
from rlfuse.data.rows import read_raw_rows
from rlfuse.data.sequence_limit import SequenceLimit
from rlfuse.errors import DataError
from rlfuse.samples import Row

MESSAGES, COMPLETION = "messages", "completion"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Tokenised demonstration."""

    index: int
    ids: np.ndarray
    """int32 [T]."""
    mask: np.ndarray
    """bool [T]: tokens with a loss; not the first one, which nothing predicts."""

    @property
    def row(self) -> Row:
        """Return it as a row: the response starts at the first token with a loss and ends at the last."""
        places = np.flatnonzero(self.mask)
        start, end = int(places[0]), int(places[-1]) + 1
        return Row(self.ids[:start], self.ids[start:end], id=str(self.index), trainable=self.mask[start:end])


def load_demonstrations(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> tuple[list[Demonstration], str]:
    """Return all demonstrations and a summary line."""
    reader, limit, found = ConversationTokenizer(tokenizer, data), SequenceLimit(data), list[Demonstration]()
    for file in files:
        for where, row in read_raw_rows(file):
            place = f"{file}, {where}"
            given = [field for field in (MESSAGES, COMPLETION) if row.get(field) is not None]
            if len(given) != 1:
                raise DataError(
                    f"{place}: has {' and '.join(given) or f'neither {MESSAGES} nor {COMPLETION}'}. A demonstration "
                    f"has either {MESSAGES}, or {data.prompt_key} and {COMPLETION}."
                )
            if given == [COMPLETION] and row.get(data.prompt_key) is None:
                raise DataError(f"{place}, field {data.prompt_key}: missing; a {COMPLETION} needs its prompt.")
            if given == [MESSAGES]:
                row = {name: value for name, value in row.items() if name != data.prompt_key}
            read = reader.read(place, row, given[0])
            mask = read.assistant & (np.arange(len(read.ids)) > 0)
            if not mask.any():
                raise DataError(f"{place}, field {given[0]}: the assistant's messages have no tokens. Remove the row.")
            if limit.keeps(place, len(read.ids)):
                found.append(Demonstration(len(found), read.ids, mask))
    return found, limit.report(files, len(found), "demonstrations")
