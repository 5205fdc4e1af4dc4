"""Engines and ranks that outlive their job: the next job of this process takes them over, as their start is most of a
job's cost.

Within `kept` the end of a job leaves Ray, its engines and its ranks alone, and the next job finds them: engines if its
own are of the same kind, else their actors, which have imported vLLM, for engines of its own; the processes of ranks if
it has as many of the same kind, for models of its own. All else is its own: rewards, controller, run folder. What a job
starts in a second attempt is new.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import ray
from rollouts import start_over

from rlfuse.cluster import placement, process_logs, watchdog
from rlfuse.engines.pipeline import pipeline_group
from rlfuse.engines.rollout.engine_actor import BACKENDS
from rlfuse.engines.trainer import rank_group, trainer_group
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.run import build as running
from rlfuse.run import inference

SLOTS = 2
LONGEST = 544
"""Tokens of the longest prompt and response, for jobs to come."""


class KeptWorker(RolloutWorker):
    """Starts an engine, and ends it for a job that needs one of another kind, or when no job will come."""

    async def start(self, model, rollout, *more):
        kind = model.path, model.dtype, rollout.tensor_model_parallel_size, rollout.quantization, rollout.draft, more[2]
        if self._engine is not None and kind != self._kind:
            await self.end()
            start_over(self, int(self.name.partition("/")[2]))
        if self._engine is None:
            self._kind, self._facts = kind, await super().start(model, rollout, *more)
        return self._facts

    async def join(self):
        """Show where it stands, and write, where the processes of the next job do; the past is of no interest there."""
        watchdog.register(self.name, self._recorder)
        await self.drain()

    async def stop(self): ...

    async def end(self):
        await super().stop()


def begin_anew(rank, config, core):
    """What a rank's new process does once it has imported what it needs, and before it meets the others."""
    rank.garbage.close()
    rank.__init__(config, rank.rank, rank.world, rank.device, core)
    rank.progress.set_call_thread()


def fit(trainer, config, count):
    """Whether its ranks can be those of a job of this configuration: so many, with whole models, met as that has it."""
    before, now = ((each.training, each.trainer.deterministic) for each in (trainer.config, config))
    return type(trainer) is trainer_group.TrainerGroup and len(trainer.ranks) == count and before == now


class Kept:
    """What jobs leave."""

    def __init__(self):
        self.slots, self.engines, self.trainers = None, {}, []
        self.folder = Path(tempfile.mkdtemp())
        """Links to where the present job's processes show where they stand, and write; Ray inherits them."""

    async def start(self, config, worker_imports=None, again=False, without=()):
        """In place of `placement.start`."""
        width, count = config.rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node
        if again:
            self.end()
        links = {name: self.folder / name for name in (watchdog.FOLDER, process_logs.FOLDER) if name in os.environ}
        for name, link in links.items():
            link.unlink(missing_ok=True)
            link.symlink_to(Path(os.environ[name]).absolute())
        if self.slots is None:
            trainer = replace(config.trainer, n_gpus_per_node=SLOTS)
            rollout = replace(config.rollout, tensor_model_parallel_size=1)
            with pytest.MonkeyPatch.context() as patch:  # of these variables only: Ray's token stays for later starts
                for name, link in links.items():
                    patch.setenv(name, str(link))
                self.slots = await start(replace(config, trainer=trainer, rollout=rollout), worker_imports, again)
        return replace(self.slots, count=count, cores=self.slots.cores[:count] if width == 1 else None)

    def stop(self, logs=None):
        """In place of `placement.stop`."""

    async def start_ranks(self, kind, config, slots, cores):
        """In place of the trainers' own: the last job's, where they fit."""
        last, self.trainers = self.trainers, []
        for trainer in last:
            if kind.__name__ == "TrainerRank" and fit(trainer, config, slots.count):
                anew = zip(trainer.ranks, cores or [None] * slots.count, strict=True)
                with suppress(ray.exceptions.RayError):  # some have died
                    ray.get([rank.__ray_call__.remote(begin_anew, config, core) for rank, core in anew], timeout=60)
                    return trainer.ranks
            for rank in trainer.ranks:
                ray.kill(rank)
        return await start_ranks(kind, config, slots, cores)

    async def build_controller(self, *given, engines, **named):
        """In place of the run's own: remembers the trainer."""
        self.trainers.append(engines.trainer)
        return await build_controller(*given, engines=engines, **named)

    def end_engines(self):
        if ended := [engine.end.remote() for engine in self.engines.values()]:
            ray.wait(ended, num_returns=len(ended), timeout=10)
        for engine in self.engines.values():
            ray.kill(engine)
        self.engines.clear()

    def end(self):
        """Nothing is left after this."""
        self.end_engines()
        if self.slots is not None:
            stop()
        self.slots = None
        self.trainers.clear()

    def rollout_handles(self, config, *more):
        """In place of the run's own: the last job's engines. Only vLLM's are worth it; others need their slots."""
        if config.rollout.name != "vllm":
            self.end_engines()
            return rollout_handles(config, *more)
        with mock.patch.object(inference, "RolloutHandle", self.handle()):
            return rollout_handles(config, *more)

    def handle(self):
        """A class in place of `RolloutHandle`."""
        kept = self.engines

        class KeptHandle(inference.RolloutHandle):
            def __init__(self, create, name, *more, **named):
                self.found = kept.pop(name, None)
                super().__init__(lambda: self.found or create(), name, *more, **named)
                self._create = create

            async def start(self, model, rollout, max_model_len, *more):
                if self.found is not None:
                    await self.actor.join.remote()
                return await super().start(model, rollout, max(max_model_len, LONGEST), *more)

            async def stop(self):
                await super().stop()
                if not self.lost:
                    kept[self.name] = self.actor

        return KeptHandle


start, stop, build_controller, start_ranks = (
    placement.start,
    placement.stop,
    running.build_controller,
    rank_group.start_ranks,
)
rollout_handles = inference.rollout_handles


@contextmanager
def kept() -> Iterator[Kept]:
    """Jobs within take engines over; these end with it."""
    all_of_them = Kept()
    hooks = {
        (placement, "start"): all_of_them.start,
        (placement, "stop"): all_of_them.stop,
        (running, "build_controller"): all_of_them.build_controller,
        (trainer_group, "start_ranks"): all_of_them.start_ranks,
        (pipeline_group, "start_ranks"): all_of_them.start_ranks,
        (inference, "rollout_handles"): all_of_them.rollout_handles,
    }
    patches = [mock.patch.object(where, name, hook) for (where, name), hook in hooks.items()]
    patches.append(mock.patch.dict(BACKENDS, vllm=f"{__name__}:{KeptWorker.__name__}"))
    for patch in patches:
        patch.start()
    try:
        yield all_of_them
    finally:
        all_of_them.end()
        shutil.rmtree(all_of_them.folder)
        for patch in patches:
            patch.stop()
