"""A job whose workers are killed, stopped and run out of memory during a step, after an undisturbed baseline run.

Run by driven_jobs.py for test_faults.py.
"""

import asyncio
import math
import os
import resource
import signal
import threading
import time
from contextlib import suppress

import psutil
from interrupted_steps import Steps

from rlfuse.config.compose import load
from rlfuse.fusion.decisions import Settings
from rlfuse.run import build as running
from rlfuse.step.controller import Controller


class Saboteur(Steps):
    """Injects each fault once over all attempts of the run."""

    def __init__(self, folder):
        super().__init__(folder)
        self.faults = [self.kill_an_engine, self.stop_all_engines, self.hang_a_rank, self.starve_a_rank]
        self.logs = folder / "faulty" / "logs"

    async def drive(self, controller, step):
        """Run the job while faults are injected; before the first attempt, run the baseline on the same engines."""
        trainer, start = controller.engines.trainer, self.folder / "start"
        if not start.exists():
            await trainer.save(start)
            assert await self.run_job("baseline")
            await trainer.load(start)
        self.controller, self.board = controller, None
        execute = controller.execute

        async def watched(board, number, *more):
            self.board, self.step = board, number
            await execute(board, number, *more)

        controller.execute = watched
        # Each slot keeps its samples until they finish: none is measured as slow, and the tail is not consolidated.
        controller.tuning.rates._measured = False
        controller.tuning.fixed = Settings(threshold=0.0)
        self.victim = await self.pid(self.engine(0))  # now, because a busy engine answers late
        injection = asyncio.create_task(self.inject_faults())
        try:
            await Controller.run(controller, step)
        finally:
            injection.cancel()

    async def inject_faults(self):
        while self.faults:
            await self.faults.pop(0)()  # the last two end an attempt each, which cancels this task

    async def kill_an_engine(self):
        actor = self.engine(0)
        await self.generating(step=1, slots=[0])
        os.kill(self.victim, signal.SIGKILL)
        while self.engine(0) is actor:
            await asyncio.sleep(0.002)

    async def stop_all_engines(self):
        """Stop one engine's actor and the other's core process in the same step, and kill a reward worker."""
        actors = self.engine(0), self.engine(1), self.controller.engines.reward._handles[0]._actor
        first, second, worker = [await self.pid(actor) for actor in actors]
        await self.generating(step=2, slots=[0, 1])
        os.kill(first, signal.SIGSTOP)
        held = len(self.held(1))
        await self.until(2, lambda: len(self.held(1)) < held)
        os.kill(core(second), signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)

    async def hang_a_rank(self):
        await self.generating(step=3, slots=[0, 1])
        begun = self.begun()
        threading.Thread(target=self.kill_a_rank_that_starts, args=(begun,), daemon=True).start()
        await self.controller.engines.trainer.ranks[1].__ray_call__.remote(hang)
        await asyncio.sleep(math.inf)

    def kill_a_rank_that_starts(self, begun):
        """Kill a rank during the next restart, once all its processes have started; no engine is ready by then."""
        while any(count == before for count, before in zip(self.begun(), begun, strict=True)):
            time.sleep(0.02)
        ranks = [each for each in psutil.Process().children(recursive=True) if is_rank(each)]
        max(ranks, key=psutil.Process.create_time).kill()

    def begun(self):
        """Return the number of processes that have written to each log."""
        names = ("rollout-0", "rollout-1", "trainer-0", "trainer-1", "reward-0")
        return [(self.logs / f"{name}.log").read_text().count(": process ") for name in names]

    async def starve_a_rank(self):
        await self.generating(step=4, slots=[0, 1])
        await self.controller.engines.trainer.ranks[1].__ray_call__.remote(starve)

    async def generating(self, step, slots):
        """Wait until these engines hold samples."""
        await self.until(step, lambda: all(map(self.held, slots)))

    async def until(self, step, condition):
        while not (self.board and self.step == step and self.board.purpose == "training" and condition()):
            await asyncio.sleep(0.002)

    def held(self, slot):
        return self.board.slot_table.slots[slot].samples

    def engine(self, slot):
        return self.controller.engines.rollout[slot].actor

    async def pid(self, actor):
        return await actor.__ray_call__.remote(lambda _: os.getpid())


def is_rank(process):
    """Return whether this is a live trainer rank; those of the previous attempt may have ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith("ray::TrainerRan") and process.create_time() > 0
    return False


def core(pid):
    """Return the pid of vLLM's engine core under an actor."""
    return max(psutil.Process(pid).children(), key=lambda child: child.memory_info().rss).pid


def hang(rank):
    """Make the next update of this rank hang."""

    def asleep_for_ever():
        time.sleep(10_000)

    rank.engines["actor"].engine.step = asleep_for_ever


def starve(rank):
    """Limit this process to the memory it has, and allocate all of it except the little that a call needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, hard))
    rank.ballast, size = [], 1 << 20
    while size > 1 << 12:
        try:
            rank.ballast.append(bytearray(size))
        except MemoryError:
            size //= 2
    del rank.ballast[0]


def perform(words):
    """Run the job; return the run folders of baseline and faulty run."""
    config = load([*words, "trainer.experiment_name=faulty"])
    saboteur = Saboteur(config.run_folder.parent)
    running.build_controller = saboteur.build_controller
    faulty = running.run(config, saboteur.drive)
    assert not saboteur.faults
    return str(faulty.with_name("baseline")), str(faulty)
