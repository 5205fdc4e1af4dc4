"""Write checkpoints during a run: complete or not at all, published once the step's rows are on disk.

No step begins that could not be saved: if the next checkpoint will not fit on the disk, the run ends with the last one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from rlfuse.config.schema import Config
from rlfuse.errors import NotSaved
from rlfuse.observe.alerts import Alert
from rlfuse.observe.run_log import RunLog
from rlfuse.progress import is_due
from rlfuse.run_folder import checkpoints
from rlfuse.run_folder.checkpoints import MIB

BYTES_PER_PARAMETER = 14
"""Of a checkpoint, at least: a float32 copy, Adam's two moments, and 2 bytes of the model as other programs load it."""


STEPS_AHEAD = 2
"""Free space has to last so many steps more, each of which takes as much as the last one."""


def next_save(
    needed: int, free: int, taken: int, *, is_saved: bool, missed: bool
) -> Literal["wait", "save", "alert", "end"]:
    """Decide about an early checkpoint. Sizes in bytes; `missed`: there was no room since the last one."""
    if free < needed:
        return "end" if is_saved else "alert"
    if not is_saved and (missed or free - STEPS_AHEAD * taken < needed):
        return "save"
    return "wait"


class Checkpointing:
    """Write checkpoints: `save` writes the models, without weights if not `weights`; `state` is the rest."""

    def __init__(
        self,
        log: RunLog,
        config: Config,
        *,
        start: int,
        save: Callable[[Path, bool], Awaitable[None]],
        state: Callable[[int], dict[str, Any]],
        parameters: int,
    ):
        self._log, self._save, self._state = log, save, state
        self._keep, self._every = config.trainer.max_ckpt_to_keep, config.trainer.save_freq
        self._first_bytes = BYTES_PER_PARAMETER * parameters
        self.step = self._written = start
        self._remembered: dict[int, dict[str, Any]] = {}
        self._missed = False
        self._free: int | None = None

    def folder(self, step: int) -> Path | None:
        return checkpoints.folder_of(self._log.folder, step) if step == self.step else None

    async def write_trial(self) -> None:
        """Try at startup what each save will do, so that none fails after hours. NotSaved with the cause."""
        self.check_disk_space(self.step)
        await checkpoints.write_trial(
            self._log.folder, self._state(self.step), lambda folder: self._save(folder, False)
        )

    def remember(self, step: int) -> None:
        """Keep the state after this step, so that it can be saved even when the next one has begun."""
        self._remembered = {step: self._state(step)}

    def is_due(self, step: int) -> bool:
        """Whether to write one after this step: by trainer.save_freq, or since it would not fit later."""
        if self._every <= 0 or is_due(self._every, step, self._log.total_steps):
            return self._every > 0
        needed, free = self._room()
        taken, self._free = max(0, (self._free or free) - free), free
        return self._decide(needed, free, taken, step) == "save"

    def check_disk_space(self, step: int) -> None:
        """Raise NotSaved if the next checkpoint will not fit and nothing is lost yet, else alert."""
        if self._every <= 0 or step >= self._log.total_steps:
            return
        needed, free = self._room()
        lacking = f"{needed / MIB:,.1f} MiB needed, {free / MIB:,.1f} MiB free in {self._log.folder}"
        match self._decide(needed, free, 0, step):
            case "end":
                raise NotSaved(
                    f"The next checkpoint will not fit: {lacking}. The run ends after step {step}, because later steps "
                    "could not be saved. Free disk space and rerun the command, or set trainer.save_freq=-1 to save "
                    "nothing."
                )
            case "alert" if not self._missed:
                self._missed = True
                text = (
                    f"The next checkpoint does not fit any more: {lacking}. Free disk space, or steps after "
                    f"{self.step} may be lost; one is written as soon as there is room."
                )
                self._log.loggers.alert(step, Alert("no disk space for a checkpoint", text))

    def _room(self) -> tuple[int, int]:
        return checkpoints.room(self._log.folder, self.step, self._keep, self._first_bytes)

    def _decide(self, needed: int, free: int, taken: int, step: int) -> str:
        return next_save(needed, free, taken, is_saved=step == self.step, missed=self._missed)

    async def write(self, step: int, required: bool = False) -> None:
        """Write a checkpoint; NotSaved if it fails and is `required` or the last, otherwise alert."""
        try:
            state, models = self._remembered[step], lambda folder: self._save(folder, True)
            await checkpoints.write(self._log.folder, step, state, models, self.step, self._keep)
        except NotSaved as error:
            if required or step == self._log.total_steps or self._log.stopping.by is not None:
                raise
            needed, free = self._room()
            self._missed = free < needed
            text = f"{error} The run continues, and writes the next one when it is due or there is room again."
            self._log.loggers.alert(step, Alert("no checkpoint", text))
        else:
            self._written = step

    def publish(self) -> None:
        """Runs resume from what was written last; rows of its step are on the disk first, so that none is missing."""
        if self._written != self.step:
            self._log.sync()
            checkpoints.publish(self._log.folder, self._written, self._keep)
            self.step, self._missed, self._free = self._written, False, None
