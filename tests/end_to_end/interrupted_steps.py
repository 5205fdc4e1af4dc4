"""A job that is killed after every stage of a step and goes on from what is on disk, on the engines that live already.

Performed by driven_jobs.py for test_interruptions.py.
"""

import asyncio
import os
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from rlfuse.cluster.watchdog import _current as watching
from rlfuse.config.compose import load
from rlfuse.data.prompts import PromptSource
from rlfuse.errors import EngineError, NotSaved, RewardError, first_error
from rlfuse.fusion.policies import POLICIES
from rlfuse.observe.tracking import read_metrics
from rlfuse.run import build as running
from rlfuse.run.job import open_job
from rlfuse.run_folder import checkpoints

ENDS = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
ENDS += ("testing", "save_checkpoint")
"""Spans of the driver; the job is killed as the first of the second step ends, an optimizer step for updates."""
PARTS = ("a push", "a checkpoint")
"""In the middle of these."""
FULL_MB = 4
"""Free on the full disk: less than a checkpoint, more than its first files."""


class Killed(BaseException):
    """Nothing that was not on disk is used after this."""


class Steps:
    """What the job does with its engines."""

    def __init__(self, folder: Path):
        self.folder, self.found = folder, {"rows": {}, "times": {}}

    async def build_controller(self, *given, **named):
        """In place of the run's own: remembers what a controller is made of."""
        self.given = given, named
        return await build_controller(*given, **named)

    async def controller(self, name: str):
        """A new one, from what the folder of the job `name` has, and the step after which it goes on."""
        (loaded, job, _), named = self.given
        engines = named["engines"]
        trainer = replace(job.config.trainer, experiment_name=name)
        job = open_job(replace(job.config, trainer=trainer))
        data, log = job.config.data, job.begin(loaded.total_steps)
        prompts = PromptSource(loaded.prompts.prompts, data.train_batch_size, data.shuffle, data.seed)
        for model, rows in engines.trainer._accumulated.items():  # a killed rank holds no gradients
            if rows:
                await engines.trainer.step(model, list(rows))
        for slot, engine in enumerate(engines.rollout):  # and its engine has the device
            await engines.trainer.release_device(slot)
            await engine.wake()
        if job.checkpoint is None:
            await engines.trainer.load(self.folder / "start")
        self.log, self.lock, loaded = log, job.lock, replace(loaded, prompts=prompts, config=job.config)
        return await build_controller(loaded, job, log, **named), job.state["step"]

    async def go_on(self, name: str, prepare=lambda controller: None) -> bool:
        """Run the job `name` to its end; False if it was killed."""
        controller, step = await self.controller(name)
        prepare(controller)
        try:
            await controller.run(step)
        except BaseException as error:
            if not isinstance(first_error(error), Killed):
                raise
            return False
        finally:
            self.log.close()
            self.lock.release()
            while any([(await engine.load()).running for engine in controller.engines.rollout]):
                await asyncio.sleep(0.01)
        return True

    async def killed(self, kind: str) -> None:
        """From the first step's checkpoint: killed in the second, resumed to the end."""
        began, name = time.time(), kind.replace(" ", "-")
        shutil.copytree(self.folder / "whole" / "global_step_1", self.folder / name / "global_step_1")
        assert not await self.go_on(name, lambda controller: kill_in(controller, kind))
        if kind == "a push":  # a new engine has none under way
            await asyncio.sleep(0.5)
            ends = (engine.finish_update(0) for engine in self.given[1]["engines"].rollout)
            await asyncio.gather(*ends, return_exceptions=True)  # one whose bucket was gone has ended it already
        if kind == "a checkpoint":  # what a process that dies there leaves
            while await self.given[1]["engines"].trainer.is_saving():  # ranks live on, unlike those of a killed process
                await asyncio.sleep(0.01)
            shutil.rmtree(self.folder / name / "global_step_2.partial", ignore_errors=True)
            shutil.copytree(
                self.folder / name / "global_step_1" / "actor", self.folder / name / "global_step_2.partial"
            )
        assert [path.name for path in checkpoints.complete(self.folder / name)] == ["global_step_1"]
        assert await self.go_on(name)
        self.keep(kind, name, began)

    def keep(self, case: str, name: str, began: float) -> None:
        self.found["rows"][case] = read_metrics(self.folder / name / "metrics.jsonl")
        self.found["times"][case] = time.time() - began
        print(case, self.found["times"][case], flush=True)
        if name != "whole":
            shutil.rmtree(self.folder / name)

    async def drive(self, controller, _):
        await controller.engines.trainer.save(self.folder / "start")
        for case in ("whole", "again"):
            began = time.time()
            assert await self.go_on(case)
            self.keep(case, case, began)
        for kind in (*PARTS, *ENDS):
            await self.killed(kind)
        await self.refused_at_startup(controller.engines.trainer)
        await self.ended_by_rewards(controller.engines.reward)
        await self.on_a_full_disk()
        began = time.time()
        assert await self.go_on("adaptive", lambda each: setattr(each, "policy", POLICIES["adaptive"]))
        self.keep("adaptive", "adaptive", began)
        await self.stopped(controller)

    async def refused_at_startup(self, trainer) -> None:
        """A rank can't write what every checkpoint has."""

        async def refuse(folder):
            assert folder.is_dir()
            raise NotSaved("trainer/1: PermissionError")

        trainer.save_metadata = refuse
        try:
            await self.controller("refused")
        except NotSaved as error:
            self.found["refused at startup"] = str(error), [each.name for each in self.folder.glob("refused/global_*")]
        del trainer.save_metadata
        self.log.close()
        shutil.rmtree(self.folder / "refused")

    async def ended_by_rewards(self, reward) -> None:
        """In the third step, before any checkpoint was due; the run then resumes to its end."""
        began, name, score = time.time(), "rewards", reward.score
        shutil.copytree(self.folder / "whole" / "global_step_1", self.folder / name / "global_step_1")

        async def fail(samples):
            if samples[0].step == 3:
                raise RewardError("the third step has no rewards")
            return await score(samples)

        def save_rarely(controller):
            controller.checkpoints._every = 9

        reward.score = fail
        try:
            await self.go_on(name, save_rarely)
        except RewardError as error:
            self.found["ended by rewards"] = (
                str(error),
                sorted(each.name for each in self.folder.glob(f"{name}/global_*")),
            )
        reward.score = score
        assert await self.go_on(name)
        self.keep("ended by rewards", name, began)

    async def on_a_full_disk(self) -> None:
        """The second step's checkpoint does not fit; it was not seen to be that large."""
        began, alerts, on_disk, filler = time.time(), [], [], self.folder / "filler"
        shutil.copytree(self.folder / "whole" / "global_step_1", self.folder / "full" / "global_step_1")

        def fill(controller):
            checkpointing, loggers, size = controller.checkpoints, self.log.loggers, checkpoints._size
            whole, call = checkpointing.write, loggers.alert

            async def checkpoint(step, required):
                if step == 2:
                    filler.write_bytes(bytes(max(0, shutil.disk_usage(self.folder).free - (FULL_MB << 20))))
                    checkpoints._size = lambda folders: 0
                await whole(step, required)
                if checkpointing._writing is not None:  # its files may be written after `write` has returned
                    await asyncio.wait([checkpointing._writing[1]])
                checkpoints._size = size
                on_disk.append(sorted(path.stem for path in self.folder.glob("full/global_step_*")))
                filler.unlink(missing_ok=True)

            checkpointing.write = checkpoint
            loggers.alert = lambda step, alert: (alerts.append(alert.text), call(step, alert))

        assert await self.go_on("full", fill)
        self.found["told of a full disk"] = *alerts, *on_disk
        self.keep("full disk", "full", began)

    async def stopped(self, controller) -> None:
        """A rank is stopped: what the driver then says, and what its stacks have."""
        trainer, said = controller.engines.trainer, []
        limit, trainer.config.cluster.timeout_s = trainer.config.cluster.timeout_s, 3.0
        watchdog = watching.get()
        watchdog._say = said.append
        victim = next(psutil.Process(each.pid) for each in watchdog._processes() if each.where == "trainer/0")
        victim.suspend()
        try:
            await controller.engines.trainer.probe()
        except EngineError as error:
            said.append(str(error))
        finally:
            victim.resume()
            trainer.config.cluster.timeout_s = limit
        watchdog._last = None
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0)
        self.found["told of a stopped rank"] = said
        self.found["stacks"] = [path.read_text() for path in sorted(watchdog.folder.glob("*.txt"))]


def kill_in(controller, kind: str) -> None:
    """Arrange for `Killed` in the second step."""
    checkpointing, recorder, push = controller.checkpoints, controller.journal.recorder, controller.engines.weights
    plain, save, receive = recorder.span, checkpointing._save, push.engines[0].receive

    @contextmanager
    def span(name, **fields):
        with plain(name, **fields) as given:
            yield given
        accumulates = name in ("update_actor", "update_critic") and "step" not in fields["attributes"]
        if name == kind and fields.get("step") == 2 and not accumulates:
            raise Killed

    async def saves_half(folder, weights):
        await save(folder, weights)
        raise Killed

    async def receives_half(info):
        if any(span.step == 2 for span in recorder.open.values()):
            push.engines[0].receive = receive
            raise Killed
        await receive(info)

    recorder.span = span
    if kind == "a checkpoint":
        checkpointing._save = saves_half
    if kind == "a push":
        push.engines[0].receive = receives_half


build_controller = running.build_controller


def perform(words):
    """What was found of each case."""
    config = load(words)
    steps = Steps(config.run_folder.parent)
    running.build_controller = steps.build_controller
    running.run(config, steps.drive)
    return steps.found
