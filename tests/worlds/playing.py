"""The real controller, executor, board and selection on engines with random durations: any finishing order occurs.

Role: `play` runs a `Scene` (scenes.py) on a virtual clock. The engines (random_engines.py) check every call against
the rules of the machine, the watched policy checks every decision against its snapshot, and the journal checks which
samples each step learned from.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from rlfuse.algorithms.experience import Experience
from rlfuse.costs.rates import Rates
from rlfuse.data.prompts import PromptSource
from rlfuse.errors import DataError, SlotRefused, first_error
from rlfuse.events import Span
from rlfuse.fusion.decisions import Accumulate, Generate, Move, Score, Switch, Train
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.selection import Selection
from rlfuse.fusion.states import SampleState
from rlfuse.fusion.tuning import Tuning
from rlfuse.progress import is_due
from rlfuse.protocols import Engines
from rlfuse.samples import Group, Partial, Prompt, Reward, RewardFailure
from rlfuse.simulate.clock import run_virtual
from rlfuse.step.advantages import Advantages
from rlfuse.step.colocation import hand_over_all, to_engine, to_ranks
from rlfuse.step.controller import Controller
from rlfuse.step.draining import Draining
from rlfuse.step.groups import GroupSource
from rlfuse.stopping import Stopping
from worlds.random_engines import Rollout, Trainer
from worlds.scenes import Scene

PATIENCE_S = 100_000.0
"""Virtual seconds after which a run counts as stuck; the longest runs take hundreds."""


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(i, np.array([1, 2], np.int32), "p", (), "source", "0") for i in range(first, first + count)]


def play(scene: Scene) -> World:
    """Run the scene and return its world with a record of all events. Raises the first error."""
    world = World(scene)
    run_virtual(asyncio.wait_for(world.run(), PATIENCE_S))
    return world


def assert_whole_batches(scene: Scene, run: Callable[[Scene], World] = play) -> None:
    """Check that dynamic sampling fills the whole batch, or ends the run with the number of groups found."""
    try:
        world = run(scene)
    except* DataError as stopped:
        found, needed = re.search(r"found (\d+) groups .* (\d+) are needed", str(first_error(stopped))).groups()
        assert int(found) < int(needed) == scene.batch
    else:
        assert [len(groups) for groups in world.learned] == [scene.batch] * scene.steps


class World:
    """A machine, a job on it and a record of all calls."""

    resumed = False

    def __init__(self, scene: Scene):
        self.scene, self.rng = scene, np.random.default_rng(scene.seed)
        self.source = PromptSource(prompts(scene.prompts), scene.batch, True, scene.seed)
        self.selection = Selection(scene.data, scene.excess, scene.batch, self.source)
        self.rollouts = [Rollout(self, index) for index in range(scene.slots)]
        self.trainer, self.experience = Trainer(self), Watched(self)
        self.stopping = Stopping(0.0, print)
        self.first: dict[str, int] = {}
        self.went_on: dict[str, int] = {}
        """Sample -> the engine that continued it last."""
        self.has: dict[str, Partial] = {}
        self.scored: dict[str, Counter] = defaultdict(Counter)
        self.decided: Counter = Counter()
        self.learned: list[list[Group]] = []
        self.staleness: list[int] = []
        self.skipped: list[int] = []
        """By step, samples whose actor passes were skipped."""
        self.overlapped: set[str] = set()
        self.engines_restarted = 0

    async def run(self) -> None:
        loop, lengths = asyncio.get_running_loop(), Lengths(self.scene.costs.max_tokens)
        if self.scene.known:
            lengths.learn({i: [int(self.rng.integers(1, lengths.expect(i) * 4))] for i in range(self.scene.prompts)})
        for slot, when in enumerate(self.scene.lost):
            loop.call_later(when, self.rollouts[slot].fail)
        for when, slot in self.scene.changes:
            loop.call_later(when, self._change, slot)
        config, engines = self.config(), Engines(self.rollouts, self, self.trainer, self)
        groups = GroupSource(
            config=config,
            engines=engines,
            prompts=self.source,
            selection=self.selection,
            recorder=self.recorder,
            held_out=prompts(2, first=self.scene.prompts),
        )
        rates = Rates(self.scene.slots, set(self.scene.drained))
        tuning = Tuning(self.scene.costs, lengths, self.scene.settings, rates)
        self.draining = Draining(engines, tuning)
        self.controller = Controller(
            config=config,
            engines=engines,
            policy=self.policy,
            groups=groups,
            advantages=Advantages(
                experience=self.experience,
                groups=groups,
                metrics=self,
                failures=self,
                recorder=self.recorder,
                clock=loop.time,
            ),
            tuning=tuning,
            draining=self.draining,
            journal=self,
            metrics=self,
            checkpoints=self,
            stopping=self.stopping,
            total_steps=self.scene.steps,
            say=lambda text: None,
            clock=loop.time,
        )
        if self.resumed:
            await hand_over_all(to_ranks, self.rollouts, self.trainer)  # as in a real job
            await self.trainer.load(Path("checkpoint"))
        await self.controller.run(0)

    def config(self):
        """Return the job's configuration."""
        return self.scene.config()

    def _change(self, slot: int) -> None:
        if slot in self.draining.drained:
            self.draining.restore_slot(slot)
        else:
            with suppress(SlotRefused):  # the last working engine
                self.draining.drain_slot(slot)

    async def pass_time(self) -> None:
        await asyncio.sleep(self.rng.exponential(0.1))

    def has_advantage(self, sample) -> bool:
        return sample.seed % 100 >= self.scene.zero

    # Rewards and weights ---------------------------------------------------------------------------------------------

    async def score(self, samples) -> list[Reward | RewardFailure]:
        await self.pass_time()
        self.scored["reward"].update(sample.id for sample in samples)
        failing = [sample.seed % 100 < self.scene.failing for sample in samples]
        return [
            RewardFailure("f", "m") if fails else Reward(float(s.seed // 100 % 2))
            for s, fails in zip(samples, failing, strict=True)
        ]

    async def push(self, version: int) -> None:
        await hand_over_all(to_engine, self.rollouts, self.trainer)
        for rollout in self.rollouts:
            assert not rollout.held
            rollout.weight_version, rollout.lost = version, False

    async def restart_engine(self, slot: int) -> None:
        assert all(rollout.lost for rollout in self.rollouts) and not self.trainer.steps["actor"]
        await self.trainer.release_device(slot)
        self.rollouts[slot].lost = False
        self.engines_restarted += 1

    # The watched policy ----------------------------------------------------------------------------------------------

    def policy(self, view):
        """Return the scene's policy; it checks that each decision is possible."""
        decisions = POLICIES[self.scene.policy](view)
        self.decided.update(type(decision).__name__ for decision in decisions)
        slots, names, groups, admitted = Counter(), Counter(), Counter(), Counter()
        for decision in decisions:
            if isinstance(decision, Generate):
                place = view.slots[decision.slot]
                assert place.role == "rollout" and place.alive and not place.busy and not place.drained
                groups.update(decision.groups)
                slots[decision.slot] += 1
                self._fits(view, place, decision.groups)
            elif isinstance(decision, Move):
                source, target = view.slots[decision.source], view.slots[decision.target]
                assert target.alive and target.role == "rollout" and not target.busy and source is not target
                assert not target.drained
                assert all(source.samples[name].state is not SampleState.LEAVING for name in decision.samples)
                names.update((name, "move") for name in decision.samples)
                admitted[decision.target] += len(decision.samples)
                assert target.load + admitted[decision.target] <= view.costs.max_sequences
            elif isinstance(decision, Switch):
                assert decision.slot in {*view.idle_trainers, *view.idle_engines}
                assert view.slots[decision.slot].role != decision.role
                assert decision.role == "trainer" or not view.slots[decision.slot].drained
                slots[decision.slot] += 1
            elif isinstance(decision, Score) and decision.kind == "reward":
                assert view.unscored["reward"].keys() >= set(decision.samples)
                names.update((name, "reward") for name in decision.samples)
            elif isinstance(decision, Score | Accumulate):
                score = isinstance(decision, Score)
                passes, open_ = (decision.kinds, view.unscored) if score else (decision.models, view.ready)
                together = view.settings.lockstep if score else view.settings.lockstep_backward
                assert (decision.slot is None) == together
                on = range(len(view.slots)) if together else (decision.slot,)
                assert view.all_ranks_idle if together else decision.slot in view.idle_trainers
                assert together or not view.slots[decision.slot].drained
                for what in passes:
                    later = view.deferred.get(what, {}).values() if score else ()
                    assert any(names_.keys() >= set(decision.samples) for names_ in (open_[what], *later))
                    names.update((name, what) for name in decision.samples)
                slots.update(on)
            elif isinstance(decision, Train):
                assert view.settings.pipelined and decision.samples
                for model, samples in decision.samples.items():
                    assert samples and view.ready[model].keys() >= set(samples)
                    names.update((name, model) for name in samples)
                for kind, samples in decision.passes.items():
                    later = {name for part in view.deferred[kind].values() for name in part}
                    assert kind in self.experience.deferred and later >= set(samples) != set()
                assert all(slot.idle and slot.role == "trainer" for slot in view.slots)
                slots.update(range(len(view.slots)))
            else:
                assert set(decision.models) <= {*view.ready_to_step}
                assert all(slot.idle and slot.role == "trainer" for slot in view.slots)
                slots.update(range(len(view.slots)))
        for counts in (slots, names, groups):
            assert all(count == 1 for count in counts.values()), f"decided twice: {counts}"
        assert groups.keys() <= view.waiting.keys()
        return decisions

    def _fits(self, view, place, groups) -> None:
        """Check that the slot's capacity is kept, unless one group alone exceeds it."""
        load, reserved = place.load, place.reserved
        for group in groups:
            count = view.waiting[group]
            load, reserved, alone = load + count, reserved + count * sum(view.expected(group)), not load
            assert alone or (load <= view.costs.max_sequences and reserved <= view.costs.kv_tokens)

    # Journal, metrics, failures and checkpoints --------------------------------------------------------------------

    @property
    def recorder(self):
        return self

    @contextmanager
    def span(self, kind, **fields):
        yield Span(kind, "driver", 0.0)

    def add(self, values) -> None:
        pass

    def watch(self, board) -> None:
        self.board = board

    def check(self, step, board) -> None:
        pass

    def folder(self, step) -> None:
        return None

    step = 0

    def is_due(self, step) -> bool:
        return is_due(self.config().trainer.save_freq, step, self.scene.steps)

    def check_disk_space(self, step) -> None:
        pass

    def remember(self, step) -> None:
        pass

    async def write(self, step, required=False) -> None:
        pass

    def publish(self) -> None:
        pass

    async def settle_after(self, steps) -> None:
        await steps

    async def publish_written(self) -> None:
        pass

    async def settle(self) -> None:
        pass

    async def collect(self, step) -> list:
        return []

    def log_agreement(self, step, agreement) -> None:
        assert agreement.metrics["training/rollout_log_probs_diff_max"] == 0

    def log_validation(self, step, board) -> None:
        assert all(sample.reward is not None for sample in board.samples.values())

    def log_step(self, step, board, spans) -> None:
        """Check at the end of a step that each action occurred as often as it should."""
        assert not any(rollout.held for rollout in self.rollouts)
        config, kept = self.scene.config(), board.groups_to_train()
        whole = {sample.id for sample in board.needed_samples()}
        for kind in self.experience.kinds:
            counts = self.scored.pop(kind, Counter())
            assert {name for name in counts if counts[name] > 1} == set()
            missing = whole - counts.keys()
            if kind in self.experience.fused_into_first_update:
                first = {sample.id for group in board.groups[: self.scene.mini_batch] for sample in group.samples}
                assert not first & counts.keys(), f"{kind} is the first update's"
                missing -= first
            if kind in {*self.experience.deferred, *self.experience.loss_only}:
                missing -= {sample.id for sample, _ in board.failures()}  # if no sample of a mini-batch has a reward
                missing -= {sample.id for group in board.groups if not has_baseline(group) for sample in group.samples}
                missing -= self.trainer.skipped
            if kind in self.experience.loss_only and self.scene.batches is not None:  # replaced groups need none
                missing &= {sample.id for group in kept for sample in group.samples}
            assert not missing, f"{kind} is missing"
        chosen = [number for number in range(len(board.groups)) if number in self._chosen(board)]
        parts = [chosen[i : i + self.scene.mini_batch] for i in range(0, len(chosen), self.scene.mini_batch)]
        failed = {sample.id for sample, _ in board.failures()}
        live = [
            {
                sample.id
                for group in (board.groups[number] for number in part)
                for sample in group.samples
                if sample.id not in failed and has_baseline(group)
            }
            for part in parts
        ]
        for model in ("critic", "actor") if config.uses_critic else ("actor",):
            assert self.trainer.steps.pop(model, []) == [part for part in live if part] * self.scene.epochs
        assert not any(self.trainer.gradients.values())
        without = {s.id for group in kept for s in group.samples if not self.has_advantage(s)}
        assert self.trainer.skipped == (set() if self.scene.reference else without)
        self.skipped.append(len(self.trainer.skipped))
        self.trainer.skipped = set()
        for group in board.groups:
            assert len({self.first[s.id] for s in group.samples if s.id in self.first}) <= 1, "siblings apart"
        self.learned.append(kept)
        self.staleness += [step - 1 - s.response.weight_version for g in kept for s in g.samples]
        self.experience.prepared, self.experience.completed = Counter(), 0

    def _chosen(self, board) -> set[int]:
        """Return the groups that the step should learn from."""
        numbers = set(range(len(board.groups)))
        if self.scene.batches is not None:
            return set(self.experience.groups_with_nonzero_std(board.groups)[: self.scene.batch])
        if self.scene.data == "exact":
            return numbers
        if self.scene.data == "one_step_off":
            return set(range(self.scene.batch))
        left = {id(group) for group in board.unneeded_groups()[0]}
        chosen = {number for number in numbers if id(board.groups[number]) not in left}
        assert len(chosen) == self.scene.batch
        return chosen


def has_baseline(group) -> bool:
    """Return whether the group has the reward of its baseline, if it needs one."""
    return group.baseline is None or isinstance(group.baseline.reward, Reward)


class Watched(Experience):
    """An estimator that computes nothing; checks that groups are prepared once, with all inputs, and completed once."""

    def __init__(self, world: World):
        super().__init__(world.scene.config())
        self.world = world
        self.prepared, self.completed = Counter(), 0

    def prepare(self, groups) -> None:
        self.prepared.update(group.prompt.index for group in groups)
        assert max(self.prepared.values()) == 1 and not self.completed
        for sample in (sample for group in groups for sample in group.samples):
            assert isinstance(sample.reward, Reward) or "reward" not in self.kinds
            names = {"old_log_prob": "old_log_probs", "ref": "ref_log_probs", "values": "values"}
            needed = set(self.kinds) - {"reward", *self.deferred, *self.loss_only, *self.fused_into_first_update}
            assert {names[kind] for kind in needed} <= sample.tensors.keys()
            zeros = sample.response.log_probs
            advantages = np.full_like(zeros, self.world.has_advantage(sample))
            sample.tensors |= {"advantages": advantages, "returns": zeros}
            if self.config.algorithm.old_log_probs == "engine":
                sample.tensors["old_log_probs"] = zeros

    def mismatch(self, groups) -> dict[str, float]:
        samples = [sample for group in groups for sample in group.samples]
        skipped = {*self.skipped(groups)}
        assert all("old_log_probs" in sample.tensors for sample in samples if sample.id not in skipped)
        return {}

    def complete(self, groups) -> dict[str, float]:
        self.completed += 1
        assert self.completed == 1 and {group.prompt.index for group in groups} <= self.prepared.keys()
        return {}
