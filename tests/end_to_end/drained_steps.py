"""A job of which a slot is drained in the middle of a step, and restored two steps later; before, the same job calm.

Performed by driven_jobs.py for test_slots.py.
"""

import asyncio
import io
import time
from contextlib import redirect_stdout
from unittest import mock

from interrupted_steps import Steps

from rlfuse.config.compose import load
from rlfuse.errors import SlotRefused
from rlfuse.run import build as running
from rlfuse.run import slot_requests
from rlfuse.step.controller import Controller
from rlfuse.tools import slots

DRAINED, RESTORED = 2, 4
"""Steps in which that is asked for."""


class Drainer(Steps):
    """Types the commands."""

    async def drive(self, controller, step):
        trainer, start = controller.engines.trainer, self.folder / "start"
        await trainer.save(start)
        assert await self.go_on("calm")
        await trainer.load(start)
        self.controller = controller
        controller.tuning.rates._measured = False  # a slot that seems slow holds few samples, which may have ended
        plot = asyncio.create_task(self.plot())
        await Controller.run(controller, step)
        await plot

    async def plot(self):
        """The times of it, and what the commands said."""
        await self.until(1)
        await self.typed()  # the next finds all imported, and is sooner done than what it looks at
        await self.until(DRAINED, both=True)
        self.found["told"] = [await self.typed("drain", "1")]
        self.found["drained_at"] = time.time()
        self.found["told"] += [await self.typed("drain", "0"), await self.typed()]
        await self.until(RESTORED)
        self.found["table"] = await self.typed()
        self.found["restored"] = time.time()
        self.found["told"].append(await self.typed("restore", "1"))

    async def until(self, step, both=False):
        """In this step, the slots generate; `both`: each has samples that are begun."""
        place = self.controller.draining
        while not (
            self.controller.stopping.step == step
            and place.board is not None
            and sum(bool(slot.samples) for slot in place.board.slots) > both
        ):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)  # for tokens

    async def typed(self, *words) -> str:
        """What `rlfuse slots` says."""

        def command():
            with redirect_stdout(io.StringIO()) as told:
                slots.main([*words, str(self.folder / "drained")])
            return told.getvalue()

        try:
            return await asyncio.to_thread(command)
        except SlotRefused as why:
            return f"refused: {why}"


def perform(words):
    """What was found."""
    config = load([*words, "trainer.experiment_name=drained"])
    drainer = Drainer(config.run_folder.parent)
    running.build_controller = drainer.build_controller
    with mock.patch.object(slot_requests, "LOOK_S", 0.02):
        running.run(config, drainer.drive)
    return drainer.found
