"""Interfaces of a step besides engines: the algorithm, logging, health checks and checkpoints.

Role: implemented by a real run and by the simulator, so that both use the same controller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlfuse.costs.model import Costs
from rlfuse.events import Recorder, Span
from rlfuse.fusion.board import Board
from rlfuse.samples import Group
from rlfuse.step.agreement import Agreement


class Experience(Protocol):
    """Computes advantages and returns from scored samples (`rlfuse.algorithms.experience.Experience`)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of scoring that every sample needs, in the serial order."""

    @property
    def actor_tensors(self) -> tuple[str, ...]:
        """Return the names of the per-token arrays that the actor's loss reads."""

    @property
    def deferred(self) -> tuple[str, ...]:
        """Return the kinds of scoring that may fill the bubbles of pipelines."""

    @property
    def loss_only(self) -> tuple[str, ...]:
        """Return the kinds of scoring that advantages do not wait for, and that skipped samples do not need."""

    @property
    def fused_into_first_update(self) -> tuple[str, ...]:
        """Return the kinds of scoring that the actor's first update computes in its own forward pass."""

    def can_train_before_batch_completes(self, model: str) -> bool:
        """Return whether the model's loss on a group can be computed before other groups are finished."""

    def groups_with_nonzero_std(self, groups: Sequence[Group]) -> list[int]:
        """Return the indices of the groups that dynamic sampling keeps, whose rewards are not all equal."""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Compute the values that depend on each of these groups alone."""

    def complete(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compute the values that are normalised over the whole (prepared) batch, and return metrics."""

    def skipped(self, groups: Sequence[Group]) -> Sequence[str]:
        """Return the ids of the samples whose actor passes are skipped, of groups with their final advantages."""

    def mismatch(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics of the log-prob differences between engines and trainer on the step's samples."""


class Journal(Protocol):
    """Collects all spans of a run (`rlfuse.observe.journal.Journal`)."""

    @property
    def recorder(self) -> Recorder:
        """Return the recorder of the driver."""

    async def collect(self, step: int) -> list[Span]:
        """Return all spans since the last call, from every process."""


class Metrics(Protocol):
    """Logs the scalars of steps (`rlfuse.observe.metric_log.MetricLog`)."""

    def add(self, values: Mapping[str, float]) -> None:
        """Add scalars to the current step; values of the same name are averaged."""

    def watch(self, board: Board) -> None:
        """Set the board that live views show."""

    def log_step(self, step: int, board: Board, spans: Sequence[Span]) -> None:
        """Log a finished step."""

    def log_validation(self, step: int, board: Board) -> None:
        """Log a finished validation."""

    def log_agreement(self, step: int, agreement: Agreement) -> None:
        """Log the comparison of engines and trainer. Raises EngineError if they differ too much."""


class Health(Protocol):
    """Detects slow and faulty workers (`rlfuse.health.monitor.Monitor`)."""

    async def check_step(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        """Check all workers after a step and return the `health/*` metrics."""


class NoHealth:
    """No-op `Health`, for simulated workers or alerts.slow_worker_s=null."""

    async def check_step(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class FailureBudget(Protocol):
    """Limit on failed rewards (`rlfuse.observe.failures.FailureBudget`)."""

    def check(self, step: int, board: Board) -> None:
        """Report new reward failures. Raises RewardError if too many rewards failed."""


class Checkpoints(Protocol):
    """Writes checkpoints (`rlfuse.run.checkpointing.Checkpointing`)."""

    @property
    def step(self) -> int:
        """Return the step of the latest checkpoint that a run can resume from."""

    def folder(self, step: int) -> Path | None:
        """Return the folder of the latest checkpoint, if it is of this step; else None."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint must be written after this step."""

    def check_disk_space(self, step: int) -> None:
        """Check free space between steps. Raises NotSaved if no later step could be saved."""

    def remember(self, step: int) -> None:
        """Keep the state after a finished step, so that its checkpoint can be written later."""

    async def write(self, step: int, required: bool = False) -> None:
        """Begin to write the checkpoint of a remembered step, and return once training may continue.

        Ranks must have the devices. Waits for the files if it is `required` or the last chance to save, and then raises
        NotSaved if they cannot be written.
        """

    async def settle(self) -> None:
        """Wait for the files of a checkpoint that is being written, and publish it."""

    async def settle_after(self, steps: Awaitable[None]) -> None:
        """Run the steps; if they fail, settle a checkpoint whose step is logged."""

    async def publish_written(self) -> None:
        """Publish a checkpoint, whose step is logged, as soon as its files are written."""

    def publish(self) -> None:
        """Make the written checkpoint the one to resume from, once the rows of the step are on disk."""
