"""A job whose slot is drained in the middle of a step and restored two steps later, after an undisturbed baseline run.

Run by driven_jobs.py for test_slots.py.
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
"""Steps in which the commands are issued."""


class Drainer(Steps):
    """Issues `rlfuse slots` commands while the job runs."""

    async def drive(self, controller, step):
        trainer, start = controller.engines.trainer, self.folder / "start"
        await trainer.save(start)
        assert await self.run_job("baseline")
        await trainer.load(start)
        self.controller = controller
        controller.tuning.rates._measured = False  # a slot measured as slow holds few samples, which may have finished
        commands = asyncio.create_task(self.issue_commands())
        await Controller.run(controller, step)
        await commands

    async def issue_commands(self):
        """Record when the commands were issued, and their outputs."""
        await self.until(1)
        await self.slots_command()  # imports everything, so that the next command is faster than generation
        await self.until(DRAINED, both=True)
        self.found["outputs"] = [await self.slots_command("drain", "1")]
        self.found["drained_at"] = time.time()
        self.found["outputs"] += [await self.slots_command("drain", "0"), await self.slots_command()]
        await self.until(RESTORED)
        self.found["table"] = await self.slots_command()
        self.found["restored"] = time.time()
        self.found["outputs"].append(await self.slots_command("restore", "1"))

    async def until(self, step, both=False):
        """Wait until slots generate in this step; `both`: until each of them holds samples."""
        place = self.controller.draining
        while not (
            self.controller.stopping.step == step
            and place.board is not None
            and sum(bool(slot.samples) for slot in place.board.slots) > both
        ):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)  # until some tokens are generated

    async def slots_command(self, *words) -> str:
        """Return the output of `rlfuse slots`."""

        def command():
            with redirect_stdout(io.StringIO()) as output:
                slots.main([*words, str(self.folder / "drained")])
            return output.getvalue()

        try:
            return await asyncio.to_thread(command)
        except SlotRefused as why:
            return f"refused: {why}"


def perform(words):
    """Run the job; return what it recorded."""
    config = load([*words, "trainer.experiment_name=drained"])
    drainer = Drainer(config.run_folder.parent)
    running.build_controller = drainer.build_controller
    with mock.patch.object(slot_requests, "LOOK_S", 0.02):
        running.run(config, drainer.drive)
    return drainer.found
