"""Compute advantages of completely scored groups, and replace groups without reward differences (dynamic sampling).

Role: the executor of a training step calls `scored` after each scoring, so that groups become trainable while others
are still generated; a validation calls only `complete`. Never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlfuse.errors import DataError
from rlfuse.events import Recorder
from rlfuse.fusion.board import Board
from rlfuse.step.groups import GroupSource
from rlfuse.step.protocols import Experience, FailureBudget, Metrics


@dataclass(kw_only=True)
class Advantages:
    """Computes advantages by `experience`; `groups` provides more prompts for dynamic sampling."""

    experience: Experience
    groups: GroupSource
    metrics: Metrics
    failures: FailureBudget
    recorder: Recorder
    clock: Callable[[], float] = time.monotonic

    def scored(self, board: Board, step: int) -> None:
        """Make newly scored groups trainable; once all samples are scored, finish the whole batch."""
        early = [model for model in board.mini_batches if self.experience.can_train_before_batch_completes(model)]
        if complete := board.take_complete():
            if groups := board.groups_to_train(complete):
                with self.recorder.span("adv", step=step, cause="scored"):
                    self.experience.prepare(groups)
            for model in early:
                self._prepared(board, model, complete)
        if self.complete(board, step):
            with self.recorder.span("adv", step=step, cause="scored"):
                self.metrics.add(self.experience.complete(board.groups_to_train()))
            for model in set(board.mini_batches) - set(early):
                self._prepared(board, model, range(len(board.groups)))

    def _prepared(self, board: Board, model: str, groups: Sequence[int]) -> None:
        skipped = self.experience.skipped(board.groups_to_train(groups)) if model == "actor" else ()
        board.prepared(model, groups, skipped)

    def complete(self, board: Board, step: int) -> bool:
        """Return whether all samples are scored and some can be trained on. RewardError if too many rewards failed.

        With dynamic sampling, groups with equal rewards are replaced first, which adds unscored samples.
        """
        if not board.all_scored:
            return False
        self.failures.check(step, board)
        if self.groups.config.algorithm.filter_groups.enable and board.mini_batches:
            self._replace_groups(board, step)
        return board.all_scored and bool(board.groups_to_train())

    def _replace_groups(self, board: Board, step: int) -> None:
        """Choose a batch of groups with unequal rewards, or add prompts. Raises DataError if no more can be added."""
        config = self.groups.config
        needed, limit = config.data.train_batch_size, config.algorithm.filter_groups.max_num_gen_batches
        board.train_on(self.experience.groups_with_nonzero_std(board.groups), at_most=needed)
        if (found := len(board.groups_to_train())) == needed:
            return
        if board.batches == limit:
            raise self._too_few(step, board, found, f"algorithm.filter_groups.max_num_gen_batches={limit} was reached")
        if not (more := self.groups.more_groups(step, board.samples)):
            raise self._too_few(step, board, found, "data.train_files has no more prompts")
        board.extend(more, self.clock())

    def _too_few(self, step: int, board: Board, found: int, why: str) -> DataError:
        needed = self.groups.config.data.train_batch_size
        return DataError(
            f"Step {step}: dynamic sampling found {found} groups with unequal rewards; {needed} are needed "
            f"(data.train_batch_size). {len(board.groups)} prompts in {board.batches} batches were generated, and "
            f"{why}. Use prompts that the model solves sometimes, raise rollout.n or "
            "algorithm.filter_groups.max_num_gen_batches (0: no limit), or lower data.train_batch_size."
        )
