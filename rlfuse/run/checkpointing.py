"""Checkpoints of a run that is under way: written whole or not at all, counted once the step's rows are on disk.

Role: the controller has one written and, after the step is logged, published. Waits for the trainer to write its state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.errors import NotSaved
from rlfuse.observe.alerts import Alert
from rlfuse.observe.run_log import RunLog
from rlfuse.run_folder import checkpoints

BYTES_PER_PARAMETER = 14
"""Of a checkpoint, at least: a float32 copy, Adam's two moments, and 2 bytes of the model as other programs load it."""


def first_bytes(config: Config, parameters: int) -> int | None:
    """Return what a checkpoint takes at least, None where the run writes none; `parameters`: that are trained."""
    return BYTES_PER_PARAMETER * parameters if config.trainer.save_freq > 0 else None


class Checkpointing:
    """`save` writes the models into a folder, if not `weights` then all but these; `state` is the rest after a step.

    `start`: the step that the run goes on after; `keep`: trainer.max_ckpt_to_keep; `first_bytes`: of a checkpoint, as
    long as there is none to compare with, None where none is to be written.
    """

    def __init__(
        self,
        log: RunLog,
        *,
        start: int,
        keep: int | None,
        save: Callable[[Path, bool], Awaitable[None]],
        state: Callable[[int], dict[str, Any]],
        first_bytes: int | None = None,
    ):
        self._log, self._keep, self._save, self._state = log, keep, save, state
        self._first_bytes = first_bytes
        self.step = self._written = start
        self._remembered: dict[int, dict[str, Any]] = {}
        self._check_room()

    def folder(self, step: int) -> Path | None:
        """The checkpoint that runs resume from, if it is that of this step."""
        return checkpoints.folder_of(self._log.folder, step) if step == self.step else None

    async def rehearse(self) -> None:
        """Try at startup what each save will do, so that none fails after hours. NotSaved with the cause."""
        await checkpoints.rehearse(self._log.folder, self._state(self.step), lambda folder: self._save(folder, False))

    def remember(self, step: int) -> None:
        """Keep the state after this step, so that it can be saved even when the next one has begun."""
        self._remembered = {step: self._state(step)}

    async def write(self, step: int, required: bool = False) -> None:
        """Write one; `publish` makes it count.

        If that fails, the run continues with an alert; NotSaved where no later one can make up for it: if `required`,
        after the last step, and when told to end.
        """
        try:
            state = self._remembered[step]
            await checkpoints.write(self._log.folder, step, state, lambda folder: self._save(folder, True))
        except NotSaved as error:
            if required or step == self._log.total_steps or self._log.stopping.by is not None:
                raise
            text = f"{error} The run goes on, and tries again at the next one."
            self._log.loggers.alert(step, Alert("no checkpoint", text))
        else:
            self._written = step

    def publish(self) -> None:
        """Runs resume from what was written last; rows of its step are on the disk first, so that none is missing."""
        if self._written != self.step:
            self._log.sync()
            checkpoints.publish(self._log.folder, self._written, self._keep)
            self.step = self._written
            self._check_room()

    def _check_room(self) -> None:
        """At the start of a save interval, alert where its checkpoint will not fit."""
        log = self._log
        if self._first_bytes is None or self.step >= log.total_steps:
            return
        if lacking := checkpoints.lacks_room(log.folder, self._first_bytes):
            text = (
                f"The next checkpoint will not fit: {lacking}. Free disk space before it is due, or steps after "
                f"{self.step} may be lost."
            )
            log.loggers.alert(self.step, Alert("no room for a checkpoint", text))
