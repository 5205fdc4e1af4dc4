"""Reuse of engines and ranks by the next job of the same process, since starting them is most of a small job's cost.

Within `kept`, Ray, engines and ranks outlive a job. The next job reuses engines of the same kind, or else their actors,
which have imported vLLM; and the processes of ranks of the same kind and number, with new models. Rewards, controller
and run folder are always new, and so is all that a job starts in a second attempt.
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
"""Tokens of the longest prompt and response of any job."""


class KeptWorker(RolloutWorker):
    """Keeps its engine until a job needs another kind, or until the last job has ended."""

    async def start(self, model, rollout, *more):
        kind = model.path, model.dtype, rollout.tensor_model_parallel_size, rollout.quantization, rollout.draft, more[2]
        if self._engine is not None and kind != self._kind:
            await self.end()
            start_over(self, int(self.name.partition("/")[2]))
        if self._engine is None:
            self._kind, self._facts = kind, await super().start(model, rollout, *more)
        return self._facts

    async def join(self):
        """Join the next job: register with its watchdog and discard earlier events."""
        watchdog.register(self.name, self._recorder)
        await self.drain()

    async def stop(self): ...

    async def end(self):
        await super().stop()


def reset_rank(rank, config, core):
    """Reset a rank to the state of a new process before its process groups are created."""
    rank.garbage.close()
    rank.__init__(config, rank.rank, rank.world, rank.device, core)
    rank.progress.set_call_thread()


def fit(trainer, config, count):
    """Return whether the ranks can serve a job of this configuration: same number, parallelism and determinism."""
    before, now = ((each.training, each.trainer.deterministic) for each in (trainer.config, config))
    return type(trainer) is trainer_group.TrainerGroup and len(trainer.ranks) == count and before == now


class Kept:
    """Slots, engines and ranks that jobs have left."""

    def __init__(self):
        self.slots, self.engines, self.trainers = None, {}, []
        self.folder = Path(tempfile.mkdtemp())
        """Links to the folders of the current job's watchdog and logs; Ray inherits them."""

    async def start(self, config, worker_imports=None, again=False, without=()):
        """Replace `placement.start`."""
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
            with pytest.MonkeyPatch.context() as patch:  # restores these variables only: later starts need Ray's token
                for name, link in links.items():
                    patch.setenv(name, str(link))
                self.slots = await start(replace(config, trainer=trainer, rollout=rollout), worker_imports, again)
        return replace(self.slots, count=count, cores=self.slots.cores[:count] if width == 1 else None)

    def stop(self, logs=None):
        """Replace `placement.stop`."""

    async def start_ranks(self, kind, config, slots, cores):
        """Replace `start_ranks`: reuse the ranks of the last job if they fit."""
        last, self.trainers = self.trainers, []
        for trainer in last:
            if kind.__name__ == "TrainerRank" and fit(trainer, config, slots.count):
                resets = zip(trainer.ranks, cores or [None] * slots.count, strict=True)
                with suppress(ray.exceptions.RayError):  # some have died
                    ray.get([rank.__ray_call__.remote(reset_rank, config, core) for rank, core in resets], timeout=60)
                    return trainer.ranks
            for rank in trainer.ranks:
                ray.kill(rank)
        return await start_ranks(kind, config, slots, cores)

    async def build_controller(self, *given, engines, **named):
        """Replace the run's `build_controller` and keep the trainer."""
        self.trainers.append(engines.trainer)
        return await build_controller(*given, engines=engines, **named)

    def end_engines(self):
        if ended := [engine.end.remote() for engine in self.engines.values()]:
            ray.wait(ended, num_returns=len(ended), timeout=10)
        for engine in self.engines.values():
            ray.kill(engine)
        self.engines.clear()

    def end(self):
        """Stop everything that is kept."""
        self.end_engines()
        if self.slots is not None:
            stop()
        self.slots = None
        self.trainers.clear()

    def rollout_handles(self, config, *more):
        """Replace `rollout_handles`: reuse the last job's engines, but only vLLM's; other backends need their slots."""
        if config.rollout.name != "vllm":
            self.end_engines()
            return rollout_handles(config, *more)
        with mock.patch.object(inference, "RolloutHandle", self.handle()):
            return rollout_handles(config, *more)

    def handle(self):
        """Return the class that replaces `RolloutHandle`."""
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
    """Let jobs within this context reuse engines; stop these at its end."""
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
