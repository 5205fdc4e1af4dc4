"""The algorithm: one RLHF step as the controller runs it, on real engines and simulated ones alike.

Role: `run` takes the job from its first step to its last: prompts become a board of samples, an `Executor` generates,
scores and trains on them in the order the fusion policy decides, and the new weights go to the engines. Which samples,
which mini-batches and which numbers is settled here; when each piece of work runs is not.

    prompts -> groups -> Board -> Executor (policy, engines) -> weights to the engines -> checkpoint, metrics

Waits: for executors and weight pushes, both bounded by the engines' own limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlfuse.algorithms.experience import Experience
from rlfuse.config import sampling
from rlfuse.config.schema import Config
from rlfuse.data.prompts import PromptSource
from rlfuse.engines.agreement import SAMPLES, TOKENS, TRIED, compare, telling
from rlfuse.engines.colocation import all_to, to_engine, to_ranks
from rlfuse.fusion.board import Board
from rlfuse.fusion.decisions import Policy
from rlfuse.fusion.selection import Draw, Selection
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.fusion.tuning import Tuning
from rlfuse.observe.journal import Journal, due
from rlfuse.progress import timed
from rlfuse.protocols import Engines, Sampling
from rlfuse.samples import Group, Prompt, make_groups
from rlfuse.step.executor import Executor


class Controller:
    """Runs the steps of one job; `journal` keeps what happened, `selection` draws prompts, `tuning` learns costs."""

    def __init__(
        self,
        config: Config,
        engines: Engines,
        policy: Policy,
        experience: Experience,
        prompts: PromptSource,
        held_out: Sequence[Prompt],
        journal: Journal,
        selection: Selection,
        tuning: Tuning,
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config, self.engines, self.policy, self.experience = config, engines, policy, experience
        self.prompts, self.held_out, self.journal, self.total_steps = prompts, held_out, journal, total_steps
        self.selection, self.tuning, self.clock, self.recorder = selection, tuning, clock, journal.recorder
        self.sampling, self.validation = sampling.training(config), sampling.validation(config)

    async def run(self, step: int) -> None:
        """From the state after `step` (0: the start) to the last step. Stopped after a step in which it was told to."""
        with timed("first weights to the engines", self.journal.say):
            await self.sync(step)
        await self.compare(step)
        if step == 0 and self.config.trainer.val_before_train:
            await self.validate(step)
        await self.steps(step)

    async def steps(self, step: int) -> None:
        """Those after `step`; the engines have its weights."""
        while step < self.total_steps:
            step += 1
            self.journal.begin(step)
            with self.recorder.span("step", step=step):
                board = await self.learn(step)
                await self.sync(step)
            if due(self.config.trainer.test_freq, step, self.total_steps) and not self.journal.leaving:
                await self.validate(step)
            if due(self.config.trainer.save_freq, step, self.total_steps):
                await self.checkpoint(step)
            self.tuning.learn(board, await self.journal.finish(step, board))
            await self.journal.leave_if_told(step, self.checkpoint)

    async def learn(self, step: int) -> Board:
        """Generate, score and train on one batch of prompts, in the order the policy decides."""
        actor, tensors = self.config.actor, {"actor": self.experience.actor_tensors, "critic": ("values", "returns")}
        wanted = {"critic": self.config.uses_critic, "actor": step > self.config.trainer.critic_warmup}
        with self.recorder.span("data", step=step):
            draw = await self.show(self.selection.draw(lambda prompts: self.groups(prompts, step)), step)
        board = Board(
            draw.groups,
            self.slot_table(),
            self.experience.kinds,
            [model for model, trained in wanted.items() if trained],
            actor.ppo_epochs,
            actor.ppo_mini_batch_size,
            settings=self.tuning.settings(sum(len(group.samples) for group in draw.groups)),
            lengths=self.tuning.lengths,
            draw=draw,
            deferred=self.experience.deferred,
            now=self.clock(),
        )
        await self.executor(board, step, self.sampling, self.prepare, tensors).run()
        if kept := board.kept():
            self.journal.note(self.experience.mismatch(kept))
        self.selection.leave(*board.left())
        self.journal.note(await self.release("training"))
        return board

    async def compare(self, step: int) -> None:
        """Engines and trainer score the same tokens; EngineError where they don't agree, or the journal takes note."""
        sampling = Sampling(self.sampling.temperature, 1.0, -1, min(TOKENS, self.sampling.max_tokens))
        with self.recorder.span("testing", step=step, cause="weights"):
            while (group := await self.comparable(step)) is not None:
                if (agreement := await compare(self.engines, group, sampling)) is not None:
                    self.journal.compared(step, agreement)
                    break
                await self.sync(step)  # all engines were lost: others take their places
        await self.release("testing")

    async def comparable(self, step: int) -> Group | None:
        """Unfinished samples of the prompt that tells most, if its clip can be read, else of the next."""
        count, clips = SAMPLES * len(self.engines.rollout), self.engines.clips
        for prompt in sorted(self.prompts.prompts, key=telling)[:TRIED]:
            groups = make_groups([prompt], count, self.config.data.seed, step)
            if clips is None or (groups := await clips.show(groups, "testing", judge=False)):
                return groups[0]
        self.journal.say(f"engines and trainer are not compared: none of {TRIED} clips can be read")
        return None

    async def validate(self, step: int) -> None:
        """Generate and score the held-out prompts; nothing is trained."""
        if self.held_out:
            groups = make_groups(self.held_out, self.config.rollout.val_kwargs.n, self.config.data.seed, step)
            groups = await self.shown(groups, step, "testing")
            board = Board(groups, self.slot_table(), ("reward",), purpose="testing", now=self.clock())
            with self.recorder.span("testing", step=step):
                await self.executor(board, step, self.validation, self.settle, {}).run()
            self.journal.validated(step, board)
            await self.release("testing")

    async def show(self, draw: Draw, step: int) -> Draw:
        """The draw with its clips encoded, without the groups whose clips can't be."""
        groups = await self.shown(draw.groups, step, "training")
        among = sum(any(group is kept for kept in groups) for group in draw.groups[: draw.among])
        return replace(draw, groups=groups, among=among, enough=min(draw.enough, among))

    async def shown(self, groups: list[Group], step: int, holder: str) -> list[Group]:
        """The groups that can be generated; all, where there are no clips."""
        if self.engines.clips is None:
            return groups
        with self.recorder.span("encode_clips", step=step, cause=holder):
            return await self.engines.clips.show(groups, holder)

    async def release(self, holder: str) -> dict[str, float]:
        """The clips that were shown to `holder` are not read any more; what showing them took."""
        return {} if self.engines.clips is None else await self.engines.clips.release(holder)

    def prepare(self, board: Board, step: int) -> None:
        """Samples gained scores: make what is complete trainable; the whole step, when all is scored."""
        early = [model for model in board.mini_batches if self.experience.early(model)]
        if complete := board.take_complete():
            if groups := board.kept(complete):
                with self.recorder.span("adv", step=step, cause="scored"):
                    self.experience.prepare(groups)
            for model in early:
                board.prepared(model, complete)
        if board.all_scored and self.settle(board, step):
            with self.recorder.span("adv", step=step, cause="scored"):
                self.journal.note(self.experience.complete(board.kept()))
            for model in set(board.mini_batches) - set(early):
                board.prepared(model, range(len(board.groups)))

    def settle(self, board: Board, step: int) -> bool:
        """All is scored: stop if too many rewards failed; with dynamic sampling, replace groups without spread.

        False if groups were added, and so not all is scored any more; or if nothing is left to train on.
        """
        if not board.all_scored:
            return False
        self.journal.failures(step, board)
        limit, size = self.config.algorithm.filter_groups.max_num_gen_batches, self.config.data.train_batch_size
        if limit and board.mini_batches:
            board.keep(self.experience.with_spread(board.groups), at_most=size)
            if len(board.kept()) < size and board.batches < limit:
                groups = self.groups(self.prompts.next_batch(), step)
                board.extend([group for group in groups if group.samples[0].id not in board.samples], self.clock())
        return board.all_scored and bool(board.kept())

    async def sync(self, step: int) -> None:
        """What the engines generate from now on carries version `step`; they have the devices."""
        with self.recorder.span("update_weights", step=step, cause="optimizer"):
            await self.engines.weights.push(version=step)

    async def load(self, folder: Path) -> None:
        """Read the models of a checkpoint, on the devices; the sync that has to follow gives these to the engines."""
        await all_to(to_ranks, self.engines.rollout, self.engines.trainer)
        await self.engines.trainer.load(folder)

    async def checkpoint(self, step: int) -> None:
        """Write one from the devices, which the engines get back if there is more to do. As `Journal.checkpoint`."""
        await all_to(to_ranks, self.engines.rollout, self.engines.trainer)
        await self.journal.checkpoint(step)
        if step < self.total_steps and not self.journal.leaving:
            await all_to(to_engine, self.engines.rollout, self.engines.trainer)

    def slot_table(self) -> SlotTable:
        """All slots, generating."""
        return SlotTable(len(self.engines.rollout), self.tuning.costs)

    def executor(self, board: Board, step: int, sampling: Sampling, scored: Callable, tensors: dict) -> Executor:
        """What carries this board out; `scored(board, step)` is called whenever samples gained scores."""
        journal, ready = self.journal, lambda: scored(board, step)
        journal.watch(board)
        return Executor(
            board, self.engines, self.policy, step, sampling, self.recorder, ready, tensors, journal.note, self.clock
        )

    def groups(self, prompts: list[Prompt], step: int) -> list[Group]:
        """Unfinished, seeded samples of these prompts."""
        return make_groups(prompts, self.config.rollout.n, self.config.data.seed, step)
