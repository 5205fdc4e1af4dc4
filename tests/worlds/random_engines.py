"""Engines of `playing.World` with random durations, which check every call against the rules of the machine."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlfuse.errors import EngineLost
from rlfuse.protocols import DeviceSharing, Load, PassResult
from rlfuse.samples import Partial, Response
from rlfuse.step.scoring import KIND_OF

if TYPE_CHECKING:
    from worlds.playing import World


def response(tokens: int = 3, version: int = 0) -> Response:
    return Response(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), "stop", version, "text")


def partial(tokens: int, version: int = 0) -> Partial:
    return Partial(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), version)


class Rollout:
    """An engine whose samples finish in any order; it also tracks which side owns its slot's device."""

    def __init__(self, world: World, index: int):
        self.world, self.index, self.weight_version = world, index, -1
        self.role, self.work, self.lost = "rollout", "", False
        self.held: dict[str, tuple] = {}

    async def generate(self, samples, sampling, partials=None):
        if self.lost:
            for sample in samples:
                self.world.has.pop(sample.id, None)
        self._check()
        results: asyncio.Queue = asyncio.Queue()
        for sample in samples:
            self._receive(sample, (partials or {}).get(sample.id), results)
        groups, costs = {s.prompt.index for s, *_ in self.held.values()}, self.world.scene.costs
        assert len(self.held) <= costs.max_sequences or len(groups) == 1
        for _ in samples:
            name, result = await results.get()
            if result is None:
                raise EngineLost("lost")
            yield name, result

    def _check(self) -> None:
        if self.lost:
            raise EngineLost("lost")
        assert self.has("rollout") and not self.work

    def has(self, role) -> bool:
        """Return whether this side owns the device; if both stay resident, both do."""
        return self.role == role or not self.world.trainer.sharing.alternates

    def _receive(self, sample, came_with, results) -> None:
        world = self.world
        assert sample.response is None and not any(sample.id in rollout.held for rollout in world.rollouts)
        had = world.has.pop(sample.id, None)
        assert came_with is had, "it continues its own partial response"
        world.first.setdefault(sample.id, self.index)
        if came_with:
            world.went_on[sample.id] = self.index
        started = came_with or partial(0, self.weight_version)
        total = 1 + sample.seed % world.scene.costs.max_tokens
        timer = asyncio.get_running_loop().call_later(world.rng.exponential(0.3), self._finish, sample.id, total)
        self.held[sample.id] = (sample, started, total, timer, results)

    def _finish(self, name, total) -> None:
        _, started, _, _, results = self.held.pop(name)
        results.put_nowait((name, response(total, started.weight_version)))

    async def load(self) -> Load:
        return Load(len(self.held), 0, 0.0, steps=int(self.world.rng.integers(1000)))

    async def evict(self, sample_ids, carry="tokens") -> None:
        await self.world.pass_time()
        if self.lost:
            raise EngineLost("lost")
        for name in [name for name in sample_ids if name in self.held]:
            _, started, total, timer, results = self.held.pop(name)
            timer.cancel()
            tokens = int(self.world.rng.integers(len(started.token_ids), max(len(started.token_ids) + 1, total)))
            self.world.has[name] = partial(tokens, started.weight_version)
            results.put_nowait((name, self.world.has[name]))

    def fail(self) -> None:
        self.lost = True
        for name, (_, _, _, timer, results) in self.held.items():
            timer.cancel()
            results.put_nowait((name, None))
        self.held.clear()

    async def sleep(self, discard=False) -> None:
        assert not self.held

    async def wake(self, part=None) -> None:
        assert self.has("rollout")


class Trainer:
    """Ranks on the same devices: one call at a time, and only in the role `trainer`."""

    def __init__(self, world: World):
        self.world, self.sharing = world, DeviceSharing()
        self.offloaded_optimizers: dict[int, float] = {}
        self.gradients: dict[str, list[str]] = defaultdict(list)
        self.steps: dict[str, list[set[str]]] = defaultdict(list)
        self.skipped: set[str] = set()
        self.filled: Counter[str] = Counter()
        """Model -> schedules that computed its scores."""

    @contextmanager
    def _working(self, slot, kind):
        if any(rollout.held for rollout in self.world.rollouts):
            self.world.overlapped.add(kind)
        devices = self.world.rollouts if slot is None else [self.world.rollouts[slot]]
        for device in devices:
            assert device.has("trainer") and not device.work and not device.held
            device.work = "rank"
        yield
        for device in devices:
            device.work = ""

    async def _pass(self, kind, rows, slot) -> list[np.ndarray]:
        assert not self.steps["critic" if kind == "values" else "actor"] or kind == "ref", "weights have changed"
        with self._working(slot, kind):
            await self.world.pass_time()
        self.world.scored[kind].update(row.id for row in rows)
        return [np.zeros(len(row.response_ids), np.float32) for row in rows]

    async def score(self, models, rows, slot=None) -> dict[str, PassResult]:
        return {model: PassResult(await self._pass(KIND_OF[model], rows, slot), 0.0) for model in models}

    async def accumulate(self, models, rows, slot=None) -> dict[str, PassResult]:
        with self._working(slot, "gradients"):
            await self.world.pass_time()
        for model in models:
            self.gradients[model] += [row.id for row in rows]
        return {model: PassResult(self._gained(model, rows), 0.0) for model in models}

    def _gained(self, model, rows) -> list[np.ndarray]:
        """Return the old log-probs that only the actor's first update provides."""
        if model != "actor" or not rows or "old_log_probs" in rows[0].tensors:
            return []
        assert self.world.experience.fused_into_first_update and not self.steps["actor"], "weights have changed"
        assert not any("old_log_probs" in row.tensors for row in rows)
        return [np.zeros(len(row.response_ids), np.float32) for row in rows]

    async def train(self, rows, scored):
        for model, samples in rows.items():
            self.gradients[model] += [row.id for row in samples]
        self.filled.update(scored.keys())
        scores = {model: await self._pass(KIND_OF[model], samples, None) for model, samples in scored.items()}
        with self._working(None, "gradients"):
            await self.world.pass_time()
        return {}, scores, self._gained("actor", rows.get("actor", ()))

    def discard_gradients(self) -> None:
        self.gradients.clear()

    async def step(self, model, lengths, lr_factor, skipped=()) -> dict[str, float]:
        names, board = self.gradients.pop(model, []), self.world.board
        left_out = {*board.mini_batches[model].skipped_samples}
        assert model == "actor" or not left_out
        assert not any(self.world.has_advantage(board.samples[name]) for name in left_out)
        assert len(skipped) == len(left_out)
        names += left_out
        assert len(set(names)) == len(names), "a sample was accumulated twice, or although it is skipped"
        assert sorted(lengths) == sorted(len(board.samples[name].response.token_ids) for name in names)
        self.skipped.update(left_out)
        with self._working(None, "step"):
            await self.world.pass_time()
        self.steps[model].append(set(names))
        return {}

    async def probe(self) -> list[float]:
        with self._probing():
            await self.world.pass_time()
        return [1.0] * len(self.world.rollouts)

    @contextmanager
    def _probing(self):
        """Check between steps that no slot is busy."""
        assert not any(device.work or device.held for device in self.world.rollouts)
        yield
        assert not any(device.work or device.held for device in self.world.rollouts)

    async def replan(self, rates, saved=None) -> None:
        pass

    async def acquire_device(self, slot) -> None:
        await self._switch(slot, "rollout", "trainer")

    async def release_device(self, slot) -> None:
        await self._switch(slot, "trainer", "rollout")

    async def _switch(self, slot, before, after) -> None:
        device = self.world.rollouts[slot]
        if device.role == after:
            return
        assert device.role == before and not device.held and not device.work
        device.role = "switching"
        await self.world.pass_time()
        device.role = after
