"""Write checkpoints during a run: in the background, atomically, and published once the step's rows are on disk.

Ranks copy their state to shared memory; the next steps run while the files are written. No step is started that could
not be saved: if the next checkpoint will not fit on the disk, the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from rlfuse.config.schema import Config
from rlfuse.errors import NotSaved, RlfuseError
from rlfuse.observe.alerts import Alert
from rlfuse.observe.run_log import RunLog
from rlfuse.progress import is_due
from rlfuse.run_folder import checkpoints
from rlfuse.run_folder.checkpoints import MIB

STEPS_AHEAD = 2
"""Number of further steps for which the free space must suffice; each is assumed to take as much as the last one."""


def next_save(
    needed: int, free: int, taken: int, *, is_saved: bool, missed: bool
) -> Literal["wait", "save", "alert", "end"]:
    """Decide about an early checkpoint. Sizes in bytes. `missed`: there was too little space since the last one."""
    if free < needed:
        return "end" if is_saved else "alert"
    if not is_saved and (missed or free - STEPS_AHEAD * taken < needed):
        return "save"
    return "wait"


POLL_S, MAX_POLL_S = 0.05, 1.0
"""Shortest and longest time between two polls of all ranks."""
PROMPT_S = 0.5
"""Time to wait at the end of a step, in which small checkpoints are written."""


class Writer(Protocol):
    """The trainer."""

    saves_in_background: bool
    """True if its files may still be written when its `save` has returned."""

    async def is_saving(self) -> bool: ...

    async def saved(self) -> None: ...


class Checkpointing:
    """Writer of checkpoints.

    `save(folder, weights)` has the models written by `writer`; `complete(folder)` adds what depends on their files.
    `state(step)` returns the remaining state. `first_bytes`: size of the first checkpoint.
    """

    def __init__(
        self,
        log: RunLog,
        config: Config,
        *,
        start: int,
        save: Callable[[Path, bool], Awaitable[None]],
        writer: Writer,
        state: Callable[[int], dict[str, Any]],
        first_bytes: int,
        complete: Callable[[Path], Awaitable[None]] | None = None,
    ):
        self._log, self._save, self._writer, self._state, self._complete = log, save, writer, state, complete
        self._keep, self._every = config.trainer.max_ckpt_to_keep, config.trainer.save_freq
        self._first_bytes, self._limit_s = first_bytes, config.cluster.timeout_s
        self.step = self._written = start
        self._writing: tuple[int, asyncio.Task[None]] | None = None
        """Step and task of the checkpoint whose files are being written."""
        self._publishing: asyncio.Task[None] | None = None
        """Task that publishes it, once the rows of its step are logged."""
        self._remembered: dict[int, dict[str, Any]] = {}
        self._missed = False
        self._free: int | None = None

    def folder(self, step: int) -> Path | None:
        return checkpoints.folder_of(self._log.folder, step) if step == self.step else None

    async def write_trial(self) -> None:
        """Write a checkpoint without weights at startup, to detect problems early. Raises NotSaved with the cause."""
        self.check_disk_space(self.step)
        await checkpoints.write_trial(
            self._log.folder, self._state(self.step), lambda folder: self._save(folder, False)
        )

    def remember(self, step: int) -> None:
        """Keep the state after this step, so that it can be saved after the next step has begun."""
        self._remembered = {step: self._state(step)}

    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint after this step: by trainer.save_freq, or because it would not fit
        later."""
        if self._every <= 0 or is_due(self._every, step, self._log.total_steps):
            return self._every > 0
        needed, free = self._disk_space()
        taken, self._free = max(0, (self._free or free) - free), free
        return self._decide(needed, free, taken, step) == "save"

    def check_disk_space(self, step: int) -> None:
        """Raise NotSaved if the next checkpoint will not fit and the last step is saved; otherwise raise an alert."""
        if self._every <= 0 or step >= self._log.total_steps:
            return
        needed, free = self._disk_space()
        lacking = f"{needed / MIB:,.1f} MiB needed, {free / MIB:,.1f} MiB free in {self._log.folder}"
        match self._decide(needed, free, 0, step):
            case "end":
                raise NotSaved(
                    f"The next checkpoint will not fit: {lacking}. The run ends after step {step}, since later steps "
                    "could not be saved. Free disk space and rerun the command, or set trainer.save_freq=-1 to "
                    "disable checkpoints."
                )
            case "alert" if not self._missed:
                self._missed = True
                text = (
                    f"The next checkpoint no longer fits: {lacking}. Free disk space, or steps after {self.step} may "
                    "be lost; a checkpoint is written as soon as there is enough space."
                )
                self._log.loggers.alert(step, Alert("no disk space for a checkpoint", text))

    def _disk_space(self) -> tuple[int, int]:
        writing = self._writing and self._writing[0]
        return checkpoints.disk_space(self._log.folder, self.step, self._keep, self._first_bytes, writing)

    def _decide(self, needed: int, free: int, taken: int, step: int) -> str:
        is_saved = step == self.step or (self._writing is not None and step == self._writing[0])
        return next_save(needed, free, taken, is_saved=is_saved, missed=self._missed)

    async def write(self, step: int, required: bool = False) -> None:
        """Begin to write a checkpoint, and return once training may continue; wait for it if the run ends with it.

        If it fails, raise NotSaved if it is `required` or the last, and an alert otherwise.
        """
        await self.settle()
        copied, self._free = asyncio.Event(), None

        async def fill(folder: Path) -> None:
            try:
                await self._save(folder, True)
            except Exception:
                with suppress(RlfuseError):  # no file of a rank may arrive after the folder is removed
                    await self._files_written()
                raise
            copied.set()
            await self._files_written()
            if self._complete is not None:
                await self._complete(folder)

        state, keep = self._remembered[step], self._keep
        writing = checkpoints.write(self._log.folder, step, state, fill, self.step, keep)
        self._writing = step, asyncio.ensure_future(writing)
        self._writing[1].add_done_callback(lambda task: task.cancelled() or task.exception())  # if it is not awaited
        waiting = asyncio.ensure_future(copied.wait())
        await asyncio.wait([self._writing[1], waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        ends = required or step == self._log.total_steps or self._log.stopping.by is not None
        if ends or not self._writer.saves_in_background or self._writing[1].done():
            await self._finish(ends)

    async def _files_written(self) -> None:
        """Wait for the ranks' files; NotSaved if one could not be written, or not within cluster.timeout_s."""
        pause = POLL_S
        try:
            async with asyncio.timeout(self._limit_s):
                while await self._writer.is_saving():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_POLL_S)
        except TimeoutError:
            limit = f"cluster.timeout_s={self._limit_s:g} s"
            raise NotSaved(f"its files were not written within {limit}; raise it for a slow disk") from None
        await self._writer.saved()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written, and publish it."""
        publishing = self._publishing or asyncio.ensure_future(self._publish_once_written())
        self._publishing = None
        await publishing

    async def settle_after(self, steps: Awaitable[None]) -> None:
        """Run the steps; if they fail, settle a checkpoint whose step is logged, so that it is not lost."""
        try:
            await steps
        except Exception:
            if self._publishing is not None:
                with suppress(RlfuseError, OSError):  # the error of the steps is raised
                    await self.settle()
            raise

    async def publish_written(self) -> None:
        """Publish the last checkpoint once its files are written; return after PROMPT_S if they take longer."""
        if self._publishing is None:
            self._publishing = asyncio.ensure_future(self._publish_once_written())
        done, _ = await asyncio.wait([self._publishing], timeout=PROMPT_S)
        if done:
            await self.settle()

    async def _publish_once_written(self) -> None:
        await self._finish()
        self.publish()

    async def _finish(self, required: bool = False) -> None:
        if self._writing is None:
            return
        step, writing = self._writing
        await asyncio.wait([writing])
        self._writing = None
        try:
            await writing
        except NotSaved as error:
            if required:
                raise
            needed, free = self._disk_space()
            self._missed = free < needed
            text = f"{error} The run continues; the next checkpoint is written when it is due or there is enough space."
            self._log.loggers.alert(step, Alert("no checkpoint", text))
        else:
            self._written = step

    def publish(self) -> None:
        """Publish the checkpoint written last, so that runs resume from it; rows of its step are flushed to disk
        first."""
        if self._written != self.step:
            self._log.sync()
            checkpoints.publish(self._log.folder, self._written, self._keep)
            self.step, self._missed, self._free = self._written, False, None
