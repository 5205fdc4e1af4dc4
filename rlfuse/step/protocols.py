"""What a step needs beside engines: the algorithm's numbers, and those who keep what happened.

Role: a run's own parts satisfy these, and so do the simulator's stand-ins, so that one controller runs on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlfuse.costs.model import Costs
from rlfuse.events import Recorder, Span
from rlfuse.fusion.board import Board
from rlfuse.samples import Group
from rlfuse.step.agreement import Agreement


class Experience(Protocol):
    """From scored samples to what the losses read (`rlfuse.algorithms.experience.Experience`)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of scoring that every sample needs, in the serial order."""

    @property
    def actor_tensors(self) -> tuple[str, ...]:
        """Per-token arrays that the actor's loss reads."""

    @property
    def deferred(self) -> tuple[str, ...]:
        """Of `kinds`, those that may fill the bubbles of pipelines."""

    @property
    def fused_into_first_update(self) -> tuple[str, ...]:
        """Kinds of scoring that the actor's first update does in its own forward pass."""

    def can_train_before_batch_completes(self, model: str) -> bool:
        """Whether the model's loss on a group can be computed before other groups are finished."""

    def groups_with_nonzero_std(self, groups: Sequence[Group]) -> list[int]:
        """Indices of the groups that dynamic sampling keeps: those whose rewards are not all equal."""

    def prepare(self, groups: Sequence[Group]) -> None:
        """Compute what depends on each of these groups alone."""

    def complete(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compute what is normalised over the batch, all of which is prepared; metrics of it."""

    def mismatch(self, groups: Sequence[Group]) -> dict[str, float]:
        """How far engines and trainer are apart on the step's samples."""


class Journal(Protocol):
    """Keeps every span (`rlfuse.observe.journal.Journal`)."""

    @property
    def recorder(self) -> Recorder:
        """The driver's."""

    async def collect(self, step: int) -> list[Span]:
        """All spans since the last call, of every process."""


class Metrics(Protocol):
    """Keeps the scalars of steps and shows them (`rlfuse.observe.metric_log.MetricLog`)."""

    def add(self, values: Mapping[str, float]) -> None:
        """Scalars of the present step; several of a name are averaged."""

    def watch(self, board: Board) -> None:
        """This is worked on from now on, for those who look on."""

    def log_step(self, step: int, board: Board, spans: Sequence[Span]) -> None:
        """The step is over."""

    def log_validation(self, step: int, board: Board) -> None:
        """The held-out prompts of this board are answered and scored."""

    def log_agreement(self, step: int, agreement: Agreement) -> None:
        """Engines and trainer scored the same tokens. EngineError where they are too far apart to go on."""


class Health(Protocol):
    """Looks for slow and faulty workers (`rlfuse.health.monitor.Monitor`)."""

    async def check_step(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        """The step is over, and these are its spans; `health/*`."""


class NoHealth:
    """The `Health` of workers that nobody looks after: simulated ones, or where alerts.slow_worker_s is null."""

    async def check_step(self, step: int, spans: Sequence[Span], costs: Costs) -> dict[str, float]:
        """Nothing is known."""
        return {}

    def close(self) -> None:
        """Nothing was begun."""


class FailureBudget(Protocol):
    """How many rewards may fail (`rlfuse.observe.failures.FailureBudget`)."""

    def check(self, step: int, board: Board) -> None:
        """Show what newly failed to be scored; RewardError where too much did."""


class Checkpoints(Protocol):
    """Writes checkpoints (`rlfuse.run.checkpointing.Checkpointing`)."""

    @property
    def step(self) -> int:
        """The last one that runs resume from."""

    def folder(self, step: int) -> Path | None:
        """Where it is, if it is that of this step."""

    def is_due(self, step: int) -> bool:
        """Whether to write one after this step."""

    def check_disk_space(self, step: int) -> None:
        """After this step, which is saved or not, and before the next. NotSaved where no later one can be saved."""

    def remember(self, step: int) -> None:
        """The step is complete: keep the state after it, for a checkpoint of it that may be written later."""

    async def write(self, step: int, required: bool = False) -> None:
        """Write one of a step that is remembered, whole or not at all, from ranks that have the devices.

        NotSaved if it is `required`, or the last chance.
        """

    def publish(self) -> None:
        """The rows of the step are on disk: what was written counts from now on."""
