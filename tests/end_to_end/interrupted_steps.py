"""A job that is killed after every stage of a step and resumes from disk, on the same live engines.

Run by driven_jobs.py for test_interruptions.py.
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
"""Spans of the driver; the job is killed when the first such span of step 2 ends, for updates an optimizer step."""
PARTS = ("a push", "a checkpoint")
"""Operations during which the job is killed."""
FULL_MB = 4
"""Free space on the full disk: less than a checkpoint, more than its first files."""


class Killed(BaseException):
    """Simulates the death of the driver: afterwards only what is on disk is used."""


class Steps:
    """Jobs run on the same engines."""

    def __init__(self, folder: Path):
        self.folder, self.found = folder, {"rows": {}, "times": {}}

    async def build_controller(self, *given, **named):
        """Replace the run's `build_controller` and keep its arguments."""
        self.given = given, named
        return await build_controller(*given, **named)

    async def controller(self, name: str):
        """Build a controller from the run folder `name`; return it and the last completed step."""
        (loaded, job, _), named = self.given
        engines = named["engines"]
        trainer = replace(job.config.trainer, experiment_name=name)
        job = open_job(replace(job.config, trainer=trainer))
        data, log = job.config.data, job.begin(loaded.total_steps)
        prompts = PromptSource(loaded.prompts.prompts, data.train_batch_size, data.shuffle, data.seed)
        for model, rows in engines.trainer._accumulated.items():  # a restarted rank would hold no gradients
            if rows:
                await engines.trainer.step(model, list(rows))
        for slot, engine in enumerate(engines.rollout):  # and its engine would hold the device
            await engines.trainer.release_device(slot)
            await engine.wake()
        if job.checkpoint is None:
            await engines.trainer.load(self.folder / "start")
        self.log, self.lock, loaded = log, job.lock, replace(loaded, prompts=prompts, config=job.config)
        return await build_controller(loaded, job, log, **named), job.state["step"]

    async def run_job(self, name: str, prepare=lambda controller: None) -> bool:
        """Run the job `name` to its end; return False if it was killed."""
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
        """Resume from the checkpoint of step 1, kill the job in step 2, and resume it to its end."""
        began, name = time.time(), kind.replace(" ", "-")
        shutil.copytree(self.folder / "whole" / "global_step_1", self.folder / name / "global_step_1")
        assert not await self.run_job(name, lambda controller: kill_in(controller, kind))
        if kind == "a push":  # a restarted engine would have no update in progress
            await asyncio.sleep(0.5)
            ends = (engine.finish_update(0) for engine in self.given[1]["engines"].rollout)
            await asyncio.gather(*ends, return_exceptions=True)  # fails on an engine whose bucket was gone
        if kind == "a checkpoint":  # leave the files of a process that died here
            while await self.given[1][
                "engines"
            ].trainer.is_saving():  # ranks survive here, unlike those of a killed process
                await asyncio.sleep(0.01)
            shutil.rmtree(self.folder / name / "global_step_2.partial", ignore_errors=True)
            shutil.copytree(
                self.folder / name / "global_step_1" / "actor", self.folder / name / "global_step_2.partial"
            )
        assert [path.name for path in checkpoints.complete(self.folder / name)] == ["global_step_1"]
        assert await self.run_job(name)
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
            assert await self.run_job(case)
            self.keep(case, case, began)
        for kind in (*PARTS, *ENDS):
            await self.killed(kind)
        await self.refused_at_startup(controller.engines.trainer)
        await self.ended_by_rewards(controller.engines.reward)
        await self.on_a_full_disk()
        began = time.time()
        assert await self.run_job("adaptive", lambda each: setattr(each, "policy", POLICIES["adaptive"]))
        self.keep("adaptive", "adaptive", began)
        await self.stopped(controller)

    async def refused_at_startup(self, trainer) -> None:
        """Start a job whose rank cannot write a checkpoint's metadata."""

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
        """Fail the rewards of step 3 before a checkpoint was due, then resume the run to its end."""
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
            await self.run_job(name, save_rarely)
        except RewardError as error:
            self.found["ended by rewards"] = (
                str(error),
                sorted(each.name for each in self.folder.glob(f"{name}/global_*")),
            )
        reward.score = score
        assert await self.run_job(name)
        self.keep("ended by rewards", name, began)

    async def on_a_full_disk(self) -> None:
        """Fill the disk during the checkpoint of step 2, after the check for free space has passed."""
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

        assert await self.run_job("full", fill)
        self.found["full disk alerts"] = *alerts, *on_disk
        self.keep("full disk", "full", began)

    async def stopped(self, controller) -> None:
        """Stop a rank; record the driver's messages and the stacks."""
        trainer, messages = controller.engines.trainer, []
        limit, trainer.config.cluster.timeout_s = trainer.config.cluster.timeout_s, 3.0
        watchdog = watching.get()
        watchdog._say = messages.append
        victim = next(psutil.Process(each.pid) for each in watchdog._processes() if each.where == "trainer/0")
        victim.suspend()
        try:
            await controller.engines.trainer.probe()
        except EngineError as error:
            messages.append(str(error))
        finally:
            victim.resume()
            trainer.config.cluster.timeout_s = limit
        watchdog._last = None
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0)
        self.found["stopped rank messages"] = messages
        self.found["stacks"] = [path.read_text() for path in sorted(watchdog.folder.glob("*.txt"))]


def kill_in(controller, kind: str) -> None:
    """Raise `Killed` in step 2, in or after `kind`."""
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
    """Run the jobs; return what they recorded."""
    config = load(words)
    steps = Steps(config.run_folder.parent)
    running.build_controller = steps.build_controller
    running.run(config, steps.drive)
    return steps.found
