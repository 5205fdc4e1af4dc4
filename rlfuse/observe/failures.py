"""Stop a run when too many rewards fail, and record failures in `reward_failures.jsonl`."""

from __future__ import annotations

from pathlib import Path

from rlfuse.config.secrets import hidden
from rlfuse.errors import RewardError
from rlfuse.fusion.board import Board
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.tracking import failure_row, write_failures


class FailureBudget:
    """`max_failure_rate`: of a board's samples. Loggers get a table at most every `table_freq` steps."""

    def __init__(self, max_failure_rate: float, folder: Path, loggers: Loggers, table_freq: int):
        self._table_freq, self._next_table = table_freq, 0
        self.max_failure_rate, self._file, self._loggers = max_failure_rate, folder / "reward_failures.jsonl", loggers
        self._seen: set[tuple[str, str]] = set()  # of the present board, what is written already

    def check(self, step: int, board: Board) -> None:
        """Show what newly failed to be scored, and keep it; RewardError above the rate."""
        failed = board.failures()
        rows = hidden([failure_row(s, f) for s, f in failed if (board.purpose, s.id) not in self._seen])
        if not rows:
            return
        self._seen = {(board.purpose, s.id) for s, _ in failed}
        write_failures(self._file, rows)
        sample, failure = failed[0]
        raised = failure.traceback.endswith(failure.message)  # and need not be said before
        what = f"{failure.function}{'' if raised else f': {failure.message}'}\n{failure.traceback}"
        scored = sum(sample.reward is not None for sample in board.samples.values())
        detail = (
            f"{len(failed)} of {scored} samples have no reward and are left out; the first is {sample.id}: {what}"
        ).rstrip()
        if step >= self._next_table:
            self._next_table = step + self._table_freq
            self._loggers.for_each_sink(lambda sink: sink.reward_failures(step, rows))
        if len(failed) > self.max_failure_rate * scored:
            raise RewardError(
                f"{detail}\nThat is more than reward.max_failure_rate={self.max_failure_rate}, so the run stops. Mend "
                "the function, or raise the rate if these samples may be left out."
            )
        self._loggers.say(detail)
