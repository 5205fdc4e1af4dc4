"""Stop a run when too many rewards fail, and record failures in `reward_failures.jsonl`."""

from __future__ import annotations

from pathlib import Path

from rlfuse.config.secrets import hidden
from rlfuse.errors import RewardError
from rlfuse.fusion.board import Board
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.tracking import failure_row, write_failures


class FailureBudget:
    """Limit on failed rewards, as a share of the samples. Loggers get a table at most every `table_freq` steps."""

    def __init__(self, max_failure_rate: float, folder: Path, loggers: Loggers, table_freq: int):
        self._table_freq, self._next_table = table_freq, 0
        self.max_failure_rate, self._file, self._loggers = max_failure_rate, folder / "reward_failures.jsonl", loggers
        self._seen: set[tuple[str, str]] = set()  # failures of the current board that are already written

    def check(self, step: int, board: Board) -> None:
        """Report and record new failures. Raises RewardError above the rate."""
        failed = board.failures()
        rows = hidden([failure_row(s, f) for s, f in failed if (board.purpose, s.id) not in self._seen])
        if not rows:
            return
        self._seen = {(board.purpose, s.id) for s, _ in failed}
        write_failures(self._file, rows)
        sample, failure = failed[0]
        is_in_traceback = failure.traceback.endswith(failure.message)  # so the message would be there twice
        what = f"{failure.function}{'' if is_in_traceback else f': {failure.message}'}\n{failure.traceback}"
        scored = sum(sample.reward is not None for sample in board.samples.values())
        detail = (
            f"{len(failed)} of {scored} samples have no reward and are excluded; first: {sample.id}: {what}"
        ).rstrip()
        if step >= self._next_table:
            self._next_table = step + self._table_freq
            self._loggers.for_each_sink(lambda sink: sink.reward_failures(step, rows))
        if len(failed) > self.max_failure_rate * scored:
            raise RewardError(
                f"{detail}\nThis is more than reward.max_failure_rate={self.max_failure_rate}, so the run stops. Fix "
                "the function, or raise the rate if these samples may be excluded."
            )
        self._loggers.say(detail)
