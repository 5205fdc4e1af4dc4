"""Limit the length of the sequences that offline tasks train on, which are never truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlfuse.config.schema import DataConfig
from rlfuse.errors import DataError


@dataclass
class SequenceLimit:
    """Limit of prompt and response together, and the number of rows dropped because of it."""

    data: DataConfig
    dropped: int = 0

    @property
    def tokens(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length

    def keeps(self, where: str, size: int) -> bool:
        """Return whether to keep a row; DataError if it is too long and data.filter_overlong_prompts is false."""
        if size <= self.tokens:
            return True
        if not self.data.filter_overlong_prompts:
            raise DataError(
                f"{where}: a sequence has {size} tokens, but data.max_prompt_length + data.max_response_length is "
                f"{self.tokens}. Raise one, or drop such rows with data.filter_overlong_prompts=true."
            )
        self.dropped += 1
        return False

    def report(self, files: Sequence[str], kept: int, rows: str) -> str:
        """Return a summary line; DataError if no row is left. `rows`: what the files contain, e.g. `pairs`."""
        if not kept:
            raise DataError(
                f"{', '.join(files)}: no {rows} are left; all {self.dropped} are longer than {self.tokens} tokens."
            )
        note = f", {self.dropped} dropped (over {self.tokens} tokens)" if self.dropped else ""
        return f"data  {kept} {rows} from {', '.join(files)}{note}"
