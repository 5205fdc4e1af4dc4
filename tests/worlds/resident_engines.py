"""Engines and ranks that record every call in a residency ledger, and a whole job that runs on them.

Role: `ResidentWorld` is `playing.World` with GPU-like devices: the real controller, executor, weight push, start order,
saving and loading call engines that only move items of the ledger. A call whose items are not resident fails the test.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from rlfuse.engines.weights.sync import WeightPush
from rlfuse.engines.weights.tower_push import TowerPush
from rlfuse.errors import EngineLost, NotSaved
from rlfuse.protocols import PARTS, DeviceSharing
from rlfuse.run.starting import start_parts
from worlds.playing import World
from worlds.random_engines import Rollout, Trainer
from worlds.residency_replay import ResidencyReplay

BUCKETS = [["embedding"], ["layer"]]


class ResidentRollout(Rollout):
    """An engine whose weights and KV cache can each be asleep; it can be lost, also during a push."""

    name = "an engine"

    def __init__(self, world, index):
        super().__init__(world, index)
        self.asleep: set[str] = set()
        self.standing, self.dies_in_push = True, False
        self.discarded, self.discards = False, 0

    def doing(self, name):
        return self.world.ledger.running(name, self.index)

    async def start(self):
        with self.doing("start_engine"):
            await self.world.pass_time()
        self.asleep, self.standing, self.discarded = set(), True, False

    async def generate(self, samples, sampling, partials=None):
        assert self.lost or not self.discarded, "its weights are those of the next push"
        with nullcontext() if self.lost else self.doing("generate"):
            async for result in super().generate(samples, sampling, partials):
                yield result

    def fail(self):
        if self.standing:
            super().fail()
            self.standing = False
            self.world.ledger.lose_engine(self.index)

    async def sleep(self, discard=False):
        await super().sleep()
        if self.standing and "weights" not in self.asleep:
            self.discarded = discard
            self.discards += discard
            with self.doing("sleep"):
                await self.world.pass_time()
            self.asleep = set(PARTS)

    async def wake(self, part=None):
        for each in sorted(self.asleep & {part or "weights", part or "kv_cache"}, reverse=True):
            if self.standing:
                with self.doing(f"wake({each})"):
                    await self.world.pass_time()
                self.asleep.discard(each)

    # As the weight push sees it

    async def wait_ready(self):
        if not self.standing:
            await self.start()

    async def begin_update(self):
        self._check_standing()

    async def receive(self, info):
        self._check_standing()
        with self.doing("push"):
            await self.world.pass_time()
        if self.dies_in_push:
            self.dies_in_push = False
            self.fail()
            self._check_standing()

    async def finish_update(self, version):
        self._check_standing()
        self.arriving, self.lost, self.discarded = version, False, False

    async def version(self):
        self._check_standing()
        return self.arriving

    def _check_standing(self):
        if not self.standing:
            raise EngineLost("lost")


class ResidentTrainer(Trainer):
    """Ranks whose models are on the device or on the host; `residency`: as actor.optimizer_residency."""

    def __init__(self, world):
        super().__init__(world)
        self.there: set[int] = set()
        self.towers, self.disk_is_full = 0, False
        self.residency, self.fetched, self.waited = "training", 0, 0
        self.complete: set[int] = set()
        """Slots whose optimizer state is resident."""
        self.coming: dict[int, asyncio.Task] = {}
        self.turns = [asyncio.Lock() for _ in world.rollouts]  # a rank answers calls one at a time

    def doing(self, name, slot=None):
        slots = range(len(self.world.rollouts)) if slot is None else (slot,)
        return self.world.ledger.running(name, *slots)

    async def start(self, let_engines_start=lambda: None):
        with self.doing("start_ranks"):
            if not self.sharing.alternates:
                let_engines_start()
            await self.world.pass_time()
        self.there = set(range(len(self.world.rollouts)))
        self.complete = set(self.there)
        if self.residency == "step":
            with self.doing("leave_optimizer"):
                await self.world.pass_time()
            self.complete = set()
        return self, {}

    async def measure(self):
        return {}

    async def acquire_device(self, slot):
        async with self.turns[slot]:
            if slot not in self.there:
                together = self.residency == "training"
                with self.doing("acquire_device" if together else "take_weights", slot):
                    await self.world.pass_time()
                self.there.add(slot)
                if together:
                    self.complete.add(slot)
                elif self.residency == "forecast":
                    self.offloaded_optimizers[slot] = 0.05
            self.world.rollouts[slot].role = "trainer"

    async def release_device(self, slot):
        async with self.turns[slot]:
            self.offloaded_optimizers.pop(slot, None)
            await self.arrived(slot)
            if slot in self.there:
                with self.doing("release_device", slot):
                    await self.world.pass_time()
                self.there.discard(slot)
                self.complete.discard(slot)
            self.world.rollouts[slot].role = "rollout"

    async def make_room(self, slot):
        assert slot in self.there and "weights" in self.world.rollouts[slot].asleep, "before the engine's weights wake"

    # Prefetched optimizer state: a rank answers immediately and copies alongside its other calls

    async def fetch_optimizers(self, slot):
        self.offloaded_optimizers.pop(slot, None)
        if slot in self.there - self.complete and slot not in self.coming:
            self.fetched += 1
            self.coming[slot] = asyncio.create_task(self.come(slot))

    async def come(self, slot):
        with self.doing("fetch_optimizer", slot):
            await self.world.pass_time()
        self.complete.add(slot)

    async def arrived(self, slot):
        if slot in self.coming:
            await self.coming.pop(slot)

    @asynccontextmanager
    async def optimizers_there(self):
        """Load optimizer state for calls that read it, as ranks do automatically."""
        slots = range(len(self.world.rollouts))
        for slot in slots:
            await self.arrived(slot)
        self.waited += len(away := [slot for slot in slots if slot not in self.complete])
        for slot in away:
            await self.come(slot)
        yield
        if self.residency == "step":
            for slot in self.complete:
                with self.doing("leave_optimizer", slot):
                    await self.world.pass_time()
            self.complete = set()

    async def score(self, models, rows, slot=None):
        with self.doing("score", slot):
            return await super().score(models, rows, slot)

    async def accumulate(self, models, rows, slot=None):
        with self.doing("accumulate", slot):
            return await super().accumulate(models, rows, slot)

    async def train(self, rows, scored):
        with self.doing("accumulate"):
            return await super().train(rows, scored)

    async def step(self, model, lengths, lr_factor, skipped=()):
        if self.residency == "step":
            with self.doing("step_alone"):
                return await super().step(model, lengths, lr_factor, skipped)
        async with self.optimizers_there():
            with self.doing("step"):
                return await super().step(model, lengths, lr_factor, skipped)

    async def save(self, folder):
        async with self.optimizers_there():
            with self.doing("save"):
                await self.world.pass_time()
        if self.disk_is_full:
            raise NotSaved("no space left")

    async def load(self, folder):
        async with self.optimizers_there():
            with self.doing("load"):
                await self.world.pass_time()

    # As the weight push sees it

    async def bucket_plan(self):
        return BUCKETS

    async def share_ipc(self, names):
        with self.doing("export"):
            await self.world.pass_time()
        return [{"names": names, "ipc_handles": {}}]

    async def release_ipc(self):
        pass

    async def save_tower(self, path):
        with self.doing("export"):
            await self.world.pass_time()
        Path(path).touch()
        self.towers += 1
        return self.towers


class Encoder:
    """Encoder ranks, which keep a fixed share of the device."""

    def __init__(self):
        self.updated = []

    async def update_tower(self, path, updates):
        self.updated.append(updates)


class ResidentWorld(World):
    """`tower`: a folder, if the job trains a vision tower; `stop_after`: the step before SIGTERM.

    `resumed`: the job continues from a checkpoint; `residency`: of optimizers; `alternates`: engines and ranks use
    their devices alternately, else both stay resident. Every step ends with a validation and a checkpoint.
    """

    def __init__(self, scene, tower=None, stop_after=0, resumed=False, residency="training", alternates=True):
        super().__init__(scene)
        self.ledger = ResidencyReplay(scene.slots, alternates)
        self.rollouts = [ResidentRollout(self, index) for index in range(scene.slots)]
        self.trainer, self.stop_after, self.resumed = ResidentTrainer(self), stop_after, resumed
        self.trainer.residency, self.encoder = residency, Encoder()
        self.trainer.sharing = DeviceSharing(alternates)
        tower = tower and TowerPush(self.trainer, self.encoder, tower)
        self.weights = WeightPush(self.trainer, self.rollouts, 1, transfer="ipc", tower=tower)
        self.saved: list[int] = []
        self.not_saved: list[int] = []

    async def run(self):
        starts = [rollout.start for rollout in self.rollouts]
        await start_parts("cuda", trainer=self.trainer.start, engines=starts, rewards=[self.pass_time])
        await super().run()

    def config(self):
        config = self.scene.config()
        config.trainer.val_before_train, config.trainer.test_freq, config.trainer.save_freq = True, 1, 1
        config.actor.optimizer_residency = self.trainer.residency
        config.rollout.free_cache_engine = self.trainer.sharing.alternates
        return config

    async def push(self, version):
        await self.weights.push(version)
        for rollout in self.rollouts:
            assert not rollout.held
            assert rollout.lost or (not rollout.asleep and rollout.arriving == version)
            rollout.weight_version = version

    async def restart_engine(self, slot):
        assert all(rollout.lost for rollout in self.rollouts)
        await self.weights.restart_engine(slot)
        self.engines_restarted += 1

    # Checkpoints

    @property
    def step(self):
        return max(self.saved, default=0)

    async def write(self, step, required=False):
        try:
            await self.trainer.save(Path(f"global_step_{step}"))
        except NotSaved:
            self.not_saved.append(step)
        else:
            self.saved.append(step)

    def log_step(self, step, board, spans):
        super().log_step(step, board, spans)
        if step == self.stop_after:
            self.stopping.by = signal.SIGTERM
